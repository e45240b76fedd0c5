"""A small library in C, built on the spot and loaded before the C library: calls fail, or are written down."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

NAME = "MILLIONWAY_FAULTS"
NOT_RUN = {"result": "not run: there is no C compiler", "passed": None}


def begin_again_with_library() -> None:
    """Start this program again with the library loaded; nothing if it is, or if there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None or NAME in os.environ:
        return
    source = Path(__file__).with_name("calls.c")
    built = Path(os.environ.get("TMPDIR", "/tmp")) / f"millionway-faults-{os.getpid()}.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(source), "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(built), NAME: str(built)}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def library() -> ctypes.CDLL | None:
    return ctypes.CDLL(os.environ[NAME]) if NAME in os.environ else None


def remove_library() -> None:
    if NAME in os.environ:
        Path(os.environ[NAME]).unlink(missing_ok=True)

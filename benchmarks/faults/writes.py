"""A fault at every call that writes to the run folder: a clear end, and then the same bits?

A small library that is built on the spot and loaded before the C library lets the N-th write, sync, rename, opening for
writing, mkdir or read fail, for every N up to the number of such calls; where there are many, some N are drawn.
"""

import ctypes
import errno
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import scene

MUST = "every N: a clear end, then the same bits"
KINDS = ("write", "fsync", "rename", "open for writing", "mkdir", "read")
ERRORS = {"write": errno.ENOSPC, "fsync": errno.EIO, "rename": errno.EIO, "open for writing": errno.ENOSPC}
ERRORS |= {"mkdir": errno.ENOSPC, "read": errno.EIO}
AT_MOST = 40  # of each kind


def begin_again_with_library() -> None:
    """Start this program again with the library loaded; nothing if it is, or if there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None or "MILLIONWAY_FAULTS" in os.environ:
        return
    source, built = Path(__file__).with_name("failing_calls.c"), Path(os.environ.get("TMPDIR", "/tmp"))
    built = built / f"millionway-faults-{os.getpid()}.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-w", "-o", str(built), str(source), "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(built), "MILLIONWAY_FAULTS": str(built)}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def measure(folder: Path, short: bool) -> dict:
    if "MILLIONWAY_FAULTS" not in os.environ:
        return {"result": "not run: there is no C compiler", "passed": None}
    library = ctypes.CDLL(os.environ["MILLIONWAY_FAULTS"])
    _, wanted, _ = scene.whole_run(folder)
    totals, num, num_without, wrong, chance = _totals(folder, library), 0, 0, [], random.Random(0)
    for kind, total in totals.items():
        at_most = 2 if short else AT_MOST
        places = sorted(chance.sample(range(1, total + 1), at_most)) if total > at_most else range(1, total + 1)
        for place in places:
            run = folder / "faulty"
            arm = _arm(library, run, kind, place)
            child = scene.Child(scene.start(run), folder / "faulty.said", arm)
            child.wait()
            num, num_without = num + 1, num_without + (child.code == 0)
            problem = "" if child.code == 0 or scene.is_clear(child) else f"code {child.code}: {child.words[-1500:]}"
            problem = problem or scene.until_done(run, folder, chance)
            if not problem and scene.bits(run) != wanted:
                problem = "other bits"
            wrong += [f"{kind} {place} of {total}: {problem}"] if problem else []
            scene.remove(run)
    calls = ", ".join(f"{total} {kind}" for kind, total in totals.items())
    result = f"{num - len(wrong)} of {num} faults (a run makes {calls}); {num_without} did the run no harm"
    return {"result": result, "passed": not wrong, "calls": totals, "faults": num, "wrong": wrong}


def _arm(library: ctypes.CDLL, run: Path, kind: str, place: int):
    return lambda: library.fault_arm(str(run).encode(), KINDS.index(kind), ctypes.c_long(place), ERRORS[kind])


def _totals(folder: Path, library: ctypes.CDLL) -> dict[str, int]:
    """How many calls of each kind a run makes, told by the process itself at its end."""
    run, told = folder / "counted", folder / "counted.json"

    def arm() -> None:
        library.fault_arm(str(run).encode(), -1, ctypes.c_long(0), 0)
        scene.AT_END.append(lambda: told.write_text(json.dumps([library.fault_count(n) for n in range(len(KINDS))])))

    child = scene.Child(scene.start(run), folder / "counted.said", arm)
    assert child.wait() == 0, child.words
    return dict(zip(KINDS, json.loads(told.read_text())))

"""Files that are whole or not there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place to write, beside `path`; it takes the path's name when all went well, and goes away when not."""
    aside = path.with_name(path.name + ".tmp")
    try:
        yield aside
        sync(aside)
        os.replace(aside, path)
        sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """The file, or the names in the folder, are on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


def check_new(out: Path) -> None:
    """Refuse a file that exists, or whose folder does not."""
    if out.exists():
        raise ValueError(f"--out {out} exists already; choose another name")
    if not out.resolve().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.resolve().parent}")
    if not os.access(out.resolve().parent, os.W_OK):
        raise ValueError(f"--out {out} cannot be written: no permission for its folder")

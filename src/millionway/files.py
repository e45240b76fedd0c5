"""Files that are whole or not there. No link inside a folder is followed, and only what we made is removed."""

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path

TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp")


class BadFile(ValueError):
    """A file that cannot be used: which one, what is wrong with it, what to do."""

    def __init__(self, path: Path | str, problem: str, remedy: str = "") -> None:
        super().__init__(f"{path}: {problem}" + (f". {remedy}" if remedy else ""))
        self.problem = problem


# --- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file to write, beside `path`; it takes the path's name when all went well, and goes away when not.

    Nobody can have put a link in its place: its name is random, and it must not have been there.
    """
    folder, aside = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY), temporary_name(path.name)
    try:
        os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=folder))
        try:
            yield path.with_name(aside)
            _sync(aside, folder)
            os.replace(aside, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(aside, dir_fd=folder)
            raise
    finally:
        os.close(folder)


def write_whole(path: Path, text: str) -> None:
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


def temporary_name(name: str) -> str:
    """For what becomes `name` when it is complete. Hidden, and never the same twice."""
    return f".{name}.{secrets.token_hex(8)}.tmp"


def sync(path: Path) -> None:
    """The file, or the names in the folder, are on the disk when this returns."""
    _sync(path, None)


def _sync(path: Path | str, folder: int | None) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_room(file: int, path: Path, num_bytes: int) -> None:
    """Refuse an open file that would need more bytes than its disk has."""
    system = os.fstatvfs(file)
    free = system.f_bavail * system.f_frsize
    if num_bytes > free:
        raise BadFile(path, f"{num_bytes:,} bytes are needed there, and {free:,} are free", "Take a larger disk")


def reserve(file: int, path: Path, first: int, num_bytes: int) -> None:
    """Room on the disk for a part of an open file, so that it is not missing later. macOS has no call for that."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, first, num_bytes)
        except OSError as error:
            raise BadFile(path, f"no room for {num_bytes:,} bytes ({error.strerror})") from None


def open_append(path: Path) -> TextIOWrapper:
    """A text file to add lines to: its own file, not a link, a pipe or another name of somebody's file."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise _not_a_file(path) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(descriptor)
        raise _not_a_file(path)
    return os.fdopen(descriptor, "a", encoding="utf-8")


def make_folder(path: Path) -> Path:
    """The folder, which may be there already, but not as a link to another place."""
    with suppress(FileExistsError):
        path.mkdir()
        sync(path.parent)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise BadFile(path, "it is not a folder but a link or a file", "Remove it")
    return path


# --- reading ----------------------------------------------------------------------------------------------------------


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The content of a file that we wrote: not a link, a pipe or a device, and not larger than such a file is."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_a_file(path) from None
        raise BadFile(path, error.strerror or str(error)) from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _not_a_file(path)
        if status.st_size > max_bytes:
            raise BadFile(path, f"{status.st_size:,} bytes are more than such a file has")
        try:
            return file.read(max_bytes)
        except OSError as error:
            raise BadFile(path, error.strerror or str(error)) from None


def check_folder(run: Path) -> None:
    """Refuse a run folder with a link, a pipe or a device in it: what is written there must stay there."""
    waiting = [run]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                elif not entry.is_file(follow_symlinks=False):
                    raise _not_a_file(Path(entry.path))


def _not_a_file(path: Path) -> BadFile:
    remedy = "Nothing is written through it: remove it, or copy the folder with `cp -rL` and use the copy"
    return BadFile(path, "it is a link, a pipe or a device, or has a second name, and a run folder has none", remedy)


def check_new(out: Path, flag: str = "--out") -> None:
    """Refuse a file that exists, or whose folder does not."""
    if out.exists():
        raise ValueError(f"{flag} {out} exists already; choose another name")
    if not out.resolve().parent.is_dir():
        raise ValueError(f"{flag} {out}: there is no folder {out.resolve().parent}")
    if not os.access(out.resolve().parent, os.W_OK):
        raise ValueError(f"{flag} {out} cannot be written: no permission for its folder")


# --- removing ---------------------------------------------------------------------------------------------------------


def remove_leftovers(folder: Path, of: str = "") -> None:
    """What processes that were killed left half-written in a folder; `of`: only what was to become this name.

    Nobody else may be writing there now.
    """
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        match = TEMPORARY.fullmatch(name)
        if match and of in ("", match["name"]):
            remove(folder / name)


def remove(path: Path) -> None:
    """A file, a folder with all that is in it, or a link, never what it points to. It may be gone already."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)  # which follows no link either
        else:
            path.unlink()

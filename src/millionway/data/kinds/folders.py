"""Images that are files: a folder, or a list of paths."""

import csv
import errno
import io
import logging
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from millionway.data.arrow_files import pc
from millionway.data.images import UnreadableImage, check_bytes, extensions, ignored
from millionway.data.source import GONE, Keys, Labels, key_of_path, labels_from, patiently, read_patiently

log = logging.getLogger("millionway")

TRAIN_FOLDERS, TEST_FOLDERS = {"train", "training"}, {"test", "testing"}
VALIDATION_FOLDERS = {"val", "valid", "validation"}
NUM_ASKING, ASKED_AT_ONCE = 16, 1024  # threads that ask for the status of files, and files for each

# Errors of a disk or a network that may be gone a second later.
PASSING = {errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ESTALE, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN}


@dataclass
class FileSource:
    """Images that are files: the key is the path below root."""

    name: str
    root: str
    keys: Keys
    labels: Labels | None = None
    odd: dict[str, str] = field(default_factory=dict)
    """key -> path below root, where they differ: names that are not UTF-8"""
    shareable: bool = True

    def __len__(self) -> int:
        return len(self.keys)

    def path(self, index: int) -> str:
        key: str = self.keys[index]
        return os.path.join(self.root, self.odd.get(key, key))

    def statuses(self, places: np.ndarray) -> np.ndarray:
        def ask(some: np.ndarray) -> list[tuple[int, int]]:
            found = [status_of(self.path(index)) for index in some.tolist()]
            return [GONE if each is None else (each.st_size, each.st_mtime_ns) for each in found]

        if len(places) <= ASKED_AT_ONCE:
            return np.array(ask(places), dtype=np.int64).reshape(-1, 2)
        parts = np.array_split(places, -(-len(places) // ASKED_AT_ONCE))
        with ThreadPoolExecutor(NUM_ASKING) as pool:  # a disk far away answers many as fast as one
            return np.concatenate([np.array(each, dtype=np.int64) for each in pool.map(ask, parts)])

    def read(self, index: int) -> bytes:
        return read_file(self.path(index))


def status_of(path: str) -> os.stat_result | None:
    """None if it is not there; a disk that fails once is asked again."""
    try:
        return patiently(lambda: os.stat(path), _is_passing)
    except OSError:
        return None


def read_file(path: str, size: int | None = None, offset: int = 0) -> bytes:
    """So many bytes of a file, or all; a disk that fails once is asked again."""

    def read() -> bytes:
        # Without O_NONBLOCK, opening a named pipe would wait for somebody to write into it.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise UnreadableImage("not a regular file")
            num = status.st_size if size is None else size
            check_bytes(num)
            # Some files of Linux say that they are empty, and are not; or fail, and say so only when they are read.
            return _read_all(file, num if num or size == 0 else 1, offset)
        finally:
            os.close(file)

    return read_patiently(read, _is_passing)


def _read_all(file: int, num_bytes: int, offset: int) -> bytes:
    """The system may give less at a time than was asked for."""
    parts = []
    while num_bytes > 0 and (part := os.pread(file, num_bytes, offset)):
        parts.append(part)
        num_bytes, offset = num_bytes - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _is_passing(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in PASSING


def open_folder(root: Path) -> FileSource:
    """Every image below root, at any depth, in the order of its relative path."""
    others, odd, known = Counter[str](), {}, extensions()

    def keys() -> Iterator[str]:
        for name in _walk(root):
            extension = os.path.splitext(name)[1].lower()
            if extension in known:
                key = key_of_path(name)
                if key != name:
                    odd[key] = name
                yield key
            else:
                others[extension] += 1

    found = Keys(keys())
    if len(found) == 0:
        there = ignored(others) if others else "the folder is empty"
        raise ValueError(
            f"--data {root}: no image found; {there}. Looked in all subfolders for {' '.join(sorted(known))}"
        )
    if others:
        log.info("%s", ignored(others))
    found = found.take(pc.sort_indices(found.arrow).to_numpy())
    return FileSource(str(root), str(root), found, labels_of_folders(found), odd)


def _walk(root: Path) -> Iterator[str]:
    """Paths below root, symbolic links followed, each folder once (so loops end); hidden names are passed over."""
    seen = set()

    def warn(error: OSError) -> None:
        if _is_passing(error):  # its images must not count as gone
            raise ValueError(f"{error.filename} cannot be listed: {error.strerror}; try again")
        log.warning("passed over: %s: %s", error.filename, error.strerror)

    for folder, subfolders, files in os.walk(root, followlinks=True, onerror=warn):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            subfolders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith((".", "__MACOSX")))
        below = os.path.relpath(folder, root)
        below = "" if below == "." else below + os.sep
        yield from (below + name for name in files if not name.startswith("."))


def labels_of_folders(keys: Keys) -> Labels | None:
    """The name of the first folder is the label; below train/ and test/ it is the second one.

    val/ stands in for test/; where both are there, it belongs to the training images.
    """
    first, is_test = _first_folder(keys.arrow), None
    splits = pc.unique(first).to_pylist()
    if all(name.lower() in TRAIN_FOLDERS | TEST_FOLDERS | VALIDATION_FOLDERS for name in splits):
        tests = [name for name in splits if name.lower() in TEST_FOLDERS]
        tests = tests or [name for name in splits if name.lower() in VALIDATION_FOLDERS]
        is_test = pc.is_in(first, value_set=pa.array(tests, pa.string())).to_numpy()
        if not is_test.any() or is_test.all():
            is_test = None
        first = _first_folder(pc.replace_substring_regex(keys.arrow, "^[^/]*/", "", max_replacements=1))
    return labels_from(Keys(first), is_test)


def _first_folder(paths: pa.ChunkedArray) -> pa.ChunkedArray:
    """What is before the first /, '' if there is none."""
    return pc.replace_substring_regex(pc.if_else(pc.match_substring(paths, "/"), paths, ""), "(?s)/.*$", "")


def open_list(path: Path) -> FileSource:
    """A .txt with a path a line, or a .csv with a column `path` and perhaps `label`; relative to the list's folder."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(
            f"--data {path}: not a text file. Give a folder, a .txt or .csv list, or a named set."
        ) from None
    if path.suffix.lower() == ".csv":
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
        if not rows or "path" not in rows[0]:
            raise ValueError(f"--data {path}: a .csv list needs a header with a column `path` (and perhaps `label`)")
        for number, row in enumerate(rows, start=2):
            if not row["path"]:
                raise ValueError(f"--data {path}: line {number} has no path")
        names, texts = [row["path"] for row in rows], [row.get("label") or "" for row in rows]
    elif path.suffix.lower() in (".txt", ".lst", ".list", ""):
        names = [line for line in text.split("\n") if line.strip()]
        texts = [""] * len(names)
    else:
        raise ValueError(f"--data {path}: give a folder, a .txt or .csv list of paths, or a named set")
    if not names:
        raise ValueError(f"--data {path}: the list names no image")
    return list_of_files(str(path), path.parent, names, labels_from(Keys(texts)))


def list_of_files(name: str, folder: Path, names: Sequence[str], labels: Labels | None) -> FileSource:
    """Files by their paths, relative to the folder; each may be there once."""
    keys = Keys(map(key_of_path, names))
    twice = keys.repeated()
    if twice:
        raise ValueError(f"--data {name}: {len(twice)} images are listed twice, for example {twice[0]!r}")
    odd = {key: text for key, text in zip(keys, names) if key != text}
    return FileSource(name, str(folder), keys, labels, odd)

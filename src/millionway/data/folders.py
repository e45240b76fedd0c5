"""Images that are files: a folder, or a list of paths."""

import csv
import io
import logging
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from millionway.data.images import EXTENSIONS, UnreadableImage
from millionway.data.source import Labels, key_of_path, labels_from

log = logging.getLogger("millionway")

SPLIT_FOLDERS = {"train": 0, "training": 0, "test": 1, "testing": 1, "val": 1, "valid": 1, "validation": 1}


@dataclass
class FileSource:
    """Images that are files."""

    name: str
    paths: list[str]
    keys: list[str]
    labels: Labels | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def num_bytes(self, index: int) -> int:
        try:
            return os.stat(self.paths[index]).st_size
        except OSError:
            return -1

    def read(self, index: int) -> bytes:
        try:
            # Without O_NONBLOCK, opening a named pipe would wait for somebody to write into it.
            with open(os.open(self.paths[index], os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise UnreadableImage("not a regular file")
                return file.read()
        except OSError as error:
            raise UnreadableImage(error.strerror or str(error)) from None


def open_folder(root: Path) -> FileSource:
    """Every image below root, at any depth, in the order of its relative path."""
    found, num_other = [], 0
    for path in _walk(root):
        if os.path.splitext(path)[1].lower() in EXTENSIONS:
            found.append(path)
        else:
            num_other += 1
    if not found:
        others = f"{num_other} other files are there" if num_other else "the folder is empty"
        raise ValueError(
            f"--data {root}: no image found; {others}. Looked in all subfolders for {' '.join(sorted(EXTENSIONS))}"
        )
    relative = sorted((os.path.relpath(path, root), path) for path in found)
    keys = [key_of_path(name) for name, _ in relative]
    return FileSource(str(root), [path for _, path in relative], keys, labels_of_folders(keys))


def _walk(root: Path) -> Iterator[str]:
    """Files below root, symbolic links followed, each folder once (so loops end); hidden names are passed over."""
    seen = set()

    def warn(error: OSError) -> None:
        log.warning("passed over: %s: %s", error.filename, error.strerror)

    for folder, subfolders, files in os.walk(root, followlinks=True, onerror=warn):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            subfolders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith((".", "__MACOSX")))
        yield from (os.path.join(folder, name) for name in files if not name.startswith("."))


def labels_of_folders(keys: Sequence[str]) -> Labels | None:
    """The name of the first folder is the label; below train/ and test/ (or val/) it is the second one."""
    parts = [key.split("/")[:-1] for key in keys]
    is_test = None
    if all(part and part[0].lower() in SPLIT_FOLDERS for part in parts):
        is_test = np.array([SPLIT_FOLDERS[part[0].lower()] == 1 for part in parts])
        parts = [part[1:] for part in parts]
        if not is_test.any() or is_test.all():
            is_test = None
    return labels_from([part[0] if part else "" for part in parts], is_test)


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
    return list_of_files(str(path), path.parent, names, labels_from(texts))


def list_of_files(name: str, folder: Path, names: Sequence[str], labels: Labels | None) -> FileSource:
    """Files by their paths, relative to the folder; each may be there once."""
    twice = [text for text, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"--data {name}: {len(twice)} images are listed twice, for example {twice[0]!r}")
    return FileSource(name, [str(folder / text) for text in names], [key_of_path(text) for text in names], labels)

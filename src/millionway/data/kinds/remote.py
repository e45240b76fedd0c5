"""Images behind an address (s3://, gs://, http://, ...), through fsspec."""

import logging
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from millionway.data.images import EXTENSIONS, UnreadableImage, check_bytes
from millionway.data.kinds.folders import labels_of_folders
from millionway.data.source import Keys, Labels, read_patiently

log = logging.getLogger("millionway")


@dataclass
class RemoteSource:
    """Files of a file system that fsspec knows."""

    name: str
    files: Any
    paths: list[str]
    sizes: list[int]
    keys: Keys
    labels: Labels | None = None
    shareable: bool = False  # its connections belong to this process

    def __len__(self) -> int:
        return len(self.paths)

    def statuses(self, places: np.ndarray) -> np.ndarray:
        return np.array([(self.sizes[place], 0) for place in places], dtype=np.int64).reshape(-1, 2)

    def read(self, index: int) -> bytes:
        return read_patiently(lambda: self._read(index), lambda error: not isinstance(error, UnreadableImage))

    def _read(self, index: int) -> bytes:
        check_bytes(self.sizes[index])
        try:
            return self.files.cat_file(self.paths[index])
        except FileNotFoundError:
            raise UnreadableImage("it is no longer there") from None


def is_remote(data: str) -> bool:
    return "://" in data


def open_remote(data: str) -> RemoteSource:
    """Every image below the address, in the order of its path."""
    import fsspec

    try:
        files, root = fsspec.core.url_to_fs(data)
        found = files.find(root, detail=True)
    except Exception as error:  # a missing package, no permission, no such place: said by the file system
        raise ValueError(f"--data {data} cannot be listed: {str(error) or type(error).__name__}") from None
    images = {path: entry for path, entry in found.items() if os.path.splitext(path)[1].lower() in EXTENSIONS}
    if not images:
        raise ValueError(f"--data {data}: no image found among {len(found)} files")
    root = root.rstrip("/")
    listed = sorted((path.removeprefix(root).lstrip("/"), path, entry) for path, entry in images.items())
    keys = Keys(key for key, _, _ in listed)
    sizes = [int(entry.get("size") or 0) for _, _, entry in listed]
    return RemoteSource(data, files, [path for _, path, _ in listed], sizes, keys, labels_of_folders(keys))

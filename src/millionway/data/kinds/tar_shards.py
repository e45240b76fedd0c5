"""Tar shards in WebDataset's layout: NAME.jpg and perhaps NAME.cls beside it. Read at random by an index of offsets."""

import logging
import os
import re
import tarfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from millionway.data.arrow_files import kept_file, pc, read_arrow, write_arrow
from millionway.data.images import EXTENSIONS, UnreadableImage
from millionway.data.kinds.folders import read_file, status_of
from millionway.data.source import GONE, Keys, Labels, key_of_path, labels_from

log = logging.getLogger("millionway")

VERSION = 2
MAX_LABEL_BYTES = 1 << 16


@dataclass
class ShardSource:
    """Images by (shard, offset, size). Nothing stays open: any thread or process may read."""

    name: str
    shards: list[str]
    shard_of: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    keys: Keys
    labels: Labels | None = None
    shareable: bool = True

    def __len__(self) -> int:
        return len(self.keys)

    def statuses(self, places: np.ndarray) -> np.ndarray:
        """Each shard is asked once."""
        shards, shard_of = np.unique(self.shard_of[places], return_inverse=True)
        asked = [status_of(self.shards[shard]) for shard in shards]
        ends = np.array([-1 if each is None else each.st_size for each in asked], dtype=np.int64)[shard_of]
        written = np.array([0 if each is None else each.st_mtime_ns for each in asked], dtype=np.int64)[shard_of]
        sizes = self.sizes[places]
        there = self.offsets[places] + sizes <= ends
        return np.where(there[:, None], np.stack([sizes, written], axis=1), np.array(GONE, dtype=np.int64))

    def read(self, index: int) -> bytes:
        path, size, offset = self.shards[self.shard_of[index]], int(self.sizes[index]), int(self.offsets[index])
        try:
            data = read_file(path, size, offset)
        except UnreadableImage as error:
            raise UnreadableImage(f"{Path(path).name}: {error}") from None
        if len(data) < size:
            raise UnreadableImage(f"{Path(path).name} ends before it: the shard is truncated")
        return data


def expand(pattern: str) -> list[str]:
    """train-{000..099}.tar is a hundred paths."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    numbers = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return [path for n in numbers for path in expand(f"{pattern[: match.start()]}{n}{pattern[match.end() :]}")]


def open_shards(name: str, paths: Sequence[str]) -> ShardSource:
    """All images of the shards, in their order. The key is the shard's name and the name inside it."""
    twice = [path for path, count in Counter(os.path.realpath(path) for path in paths).items() if count > 1]
    if twice:
        raise ValueError(f"--data {name}: shard {twice[0]} is listed twice, so its images would have two rows each")
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        raise ValueError(f"--data {name}: {len(missing)} shards are missing, for example {missing[0]}")
    parts = [_index(path) for path in paths]
    keys = Keys(
        pa.chunked_array(
            [
                chunk
                for path, part in zip(paths, parts)
                for chunk in pc.binary_join_element_wise(Path(path).name, part["name"], "/").chunks
            ],
            pa.string(),
        )
    )
    if len(keys) == 0:
        raise ValueError(f"--data {name}: no image in {len(paths)} shards")
    repeated = keys.repeated()
    if repeated:
        raise ValueError(f"--data {name}: {len(repeated)} names occur twice, for example {repeated[0]!r}")
    index = pa.concat_tables(parts)
    shard_of = np.repeat(np.arange(len(paths)), [len(part) for part in parts])
    offsets, sizes = index["offset"].to_numpy(), index["size"].to_numpy()
    return ShardSource(name, list(paths), shard_of, offsets, sizes, keys, labels_from(Keys(index["label"])))


def _index(path: str) -> pa.Table:
    """offset, size, name and label of every image; kept, so that a shard is walked through only once."""
    kept = kept_file(path, f"shard {VERSION}")
    try:
        return read_arrow(kept)
    except (OSError, pa.ArrowException):
        pass  # not there, or not whole
    table = _walk(path)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_arrow(kept, table.schema, table.to_batches())
    except OSError as error:
        log.warning("the index of %s is not kept: %s", path, error.strerror)
    return table


def _walk(path: str) -> pa.Table:
    members, labels = [], {}
    try:
        with tarfile.open(path, "r:") as archive:
            try:
                for member in archive:
                    if not member.isfile() or member.issparse():
                        continue
                    stem, extension = os.path.splitext(member.name)
                    if extension.lower() in EXTENSIONS and not os.path.basename(stem).startswith("."):
                        members.append((member.offset_data, member.size, stem, member.name))
                    elif extension == ".cls":
                        file = archive.extractfile(member)
                        labels[stem] = file.read(MAX_LABEL_BYTES).decode("utf-8", "replace").strip() if file else ""
            except (tarfile.TarError, OSError, EOFError) as error:
                log.warning("%s is damaged after %d images: %s", path, len(members), error)
    except (tarfile.TarError, OSError) as error:
        raise ValueError(f"--data {path}: not a tar file ({error}). Compressed ones must be unpacked first.") from None
    return pa.table(
        {
            "offset": pa.array([member[0] for member in members], pa.int64()),
            "size": pa.array([member[1] for member in members], pa.int64()),
            "name": pa.array([key_of_path(member[3]) for member in members], pa.string()),
            "label": pa.array([labels.get(member[2], "") for member in members], pa.string()),
        }
    )

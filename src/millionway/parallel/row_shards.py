"""Sharded rows to and from disk: one safetensors file per rank that owns rows, whose header says which rows they are.

It is the format of torch.distributed.checkpoint's HuggingFaceStorageWriter, which reads it too. Written and read a few
rows at a time: rows that just fit into memory, or are in a file themselves, have no room for a second copy.
"""

import json
import math
import os
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from millionway.files import BadFile
from millionway.parallel.collectives import all_or_none
from millionway.parallel.group import Group
from millionway.parallel.layout import local_range
from millionway.tensor_file import DTYPES, rows_at_once, write_tensors

MAX_HEADER_BYTES = 1 << 20


def save_shards(tensors: dict[str, Tensor], folder: Path, group: Group, num_rows: int) -> None:
    """Write this rank's rows of each tensor of `num_rows` rows below `folder`. All ranks do so together."""
    start, stop = local_range(num_rows, group.rank, group.size)

    def save() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if stop > start:
            _write(folder / f"shard-{group.rank + 1:05d}-model-00001-of-00001.safetensors", tensors, start)

    all_or_none(group, save)


def load_shards(tensors: dict[str, Tensor], folder: Path, group: Group, num_rows: int) -> None:
    """Fill the given tensors with this rank's rows of what was saved, by any number of ranks."""
    start, stop = local_range(num_rows, group.rank, group.size)

    def load() -> None:
        parts = [part for path in sorted(folder.glob("*.safetensors")) for part in _parts(path)]
        for name, tensor in tensors.items():
            _fill(tensor, [part for part in parts if part.name == name], start, stop, folder / name)

    all_or_none(group, load)


@dataclass(frozen=True)
class _Part:
    """Some rows of a tensor in a file."""

    path: Path
    name: str
    dtype: torch.dtype
    first_row: int
    shape: tuple[int, ...]
    first_byte: int

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def _write(path: Path, tensors: dict[str, Tensor], first_row: int) -> None:
    places = {name: {"saved_offsets": [first_row] + [0] * (tensor.ndim - 1)} for name, tensor in tensors.items()}
    write_tensors(path, tensors, {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places), "format": "pt"})


def _parts(path: Path) -> list[_Part]:
    """What is in a file, by its header."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= MAX_HEADER_BYTES:
                raise ValueError("no header")
            header = json.loads(file.read(length))
            num_bytes = os.fstat(file.fileno()).st_size - 8 - length
        about = header.pop("__metadata__")
        places = json.loads(about["DCP_SHARDING_INFO"])
        parts = []
        for name, entry in header.items():
            (first, last), shape = map(int, entry["data_offsets"]), tuple(map(int, entry["shape"]))
            part = _Part(
                path, name, DTYPES[entry["dtype"]], int(places[name]["saved_offsets"][0]), shape, 8 + length + first
            )
            if min(shape) < 0 or not 0 <= first <= last <= num_bytes or last - first != shape[0] * part.row_bytes:
                raise ValueError(f"{name} is not all there")
            parts.append(part)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise BadFile(path, f"not a shard of rows ({error!r:.200})") from None
    return parts


def _fill(tensor: Tensor, parts: list[_Part], start: int, stop: int, what: Path) -> None:
    """The rows start : stop of all, from the parts that have some of them."""
    num_filled = 0
    for part in parts:
        if part.dtype != tensor.dtype or part.shape[1:] != tensor.shape[1:]:
            found = f"{part.dtype} [rows, {', '.join(map(str, part.shape[1:]))}]"
            raise BadFile(part.path, f"{part.name} is {found}, not {tensor.dtype} {list(tensor.shape)}")
        first, last = max(start, part.first_row), min(stop, part.first_row + part.shape[0])
        with open(part.path, "rb", buffering=0) as file:
            file.seek(part.first_byte + max(0, first - part.first_row) * part.row_bytes)
            for row in range(first, last, rows_at_once(tensor)):
                here = tensor[row - start : min(row + rows_at_once(tensor), last) - start]
                here.copy_(_read(file, here))
                num_filled += len(here)
    if num_filled != stop - start:
        raise BadFile(what, f"{num_filled} of the rows {start} to {stop} are there")


def _read(file: FileIO, like: Tensor) -> Tensor:
    rows = torch.empty(like.shape, dtype=like.dtype)
    rest = rows.view(-1).view(torch.uint8).numpy().data
    while len(rest):
        num = file.readinto(rest)
        if not num:
            raise BadFile(str(file.name), "it ends too early")
        rest = rest[num:]
    return rows

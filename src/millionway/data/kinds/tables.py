"""Parquet and Arrow files with an image column, as Hugging Face's `datasets` writes them; or with a column of paths."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from millionway.data.arrow_files import checked, kept_file, read_arrow, write_arrow
from millionway.data.images import UnreadableImage, check_bytes
from millionway.data.kinds.folders import list_of_files
from millionway.data.source import GONE, Keys, Labels, Source, labels_from

log = logging.getLogger("millionway")

EXTENSIONS = (".parquet", ".arrow", ".feather")
IMAGE_COLUMNS = ("image", "img", "jpg", "png", "bytes", "image_bytes")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "cls")
PATH_COLUMNS = ("path", "file_name", "file", "filename")


@dataclass
class TableSource:
    """Encoded images in a memory-mapped Arrow column."""

    name: str
    images: pa.ChunkedArray
    keys: Keys
    labels: Labels | None = None
    written: int = 0
    """when the newest of its files was, in nanoseconds"""
    shareable: bool = True

    def __len__(self) -> int:
        return len(self.keys)

    def statuses(self, places: np.ndarray) -> np.ndarray:
        values = (self.images[int(place)] for place in places)
        found = [(len(each.as_buffer()), self.written) if each.is_valid else GONE for each in values]
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def read(self, index: int) -> bytes:
        value = self.images[index]
        if not value.is_valid:
            raise UnreadableImage("the table has no bytes for it")
        check_bytes(len(value.as_buffer()))
        return value.as_py()


def open_table(name: str, paths: list[Path]) -> Source:
    """One table or several parts of it, in the order given."""
    parts = [_memory_mapped(path) for path in paths]
    first = parts[0].schema
    for path, part in zip(paths, parts):
        if part.schema.names != first.names:
            raise ValueError(f"--data {path}: columns {part.schema.names}, in {paths[0].name} {first.names}")
    column = next((c for c in IMAGE_COLUMNS if c in first.names and _holds_bytes(first.field(c).type)), None)
    labels = _labels(parts)
    if column is None:
        return _list_of_paths(name, paths[0].parent, parts, labels)
    images, keys = [], []
    for path, part in zip(paths, parts):
        table = pa.table({"image": part[column]})
        if pa.types.is_struct(table.schema.field("image").type):
            flat = table.flatten()
            images += flat["image.bytes"].chunks
            own = flat["image.path"].to_pylist() if "image.path" in flat.schema.names else [None] * len(flat)
        else:
            images += table["image"].chunks
            own = [None] * len(table)
        keys += [
            f"{path.name}/{row:08d}" + (f"/{Path(str(text)).name}" if text else "") for row, text in enumerate(own)
        ]
    return TableSource(
        name, pa.chunked_array(images), Keys(keys), labels, max(path.stat().st_mtime_ns for path in paths)
    )


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(kind.field(i).name == "bytes" for i in range(kind.num_fields))
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _list_of_paths(name: str, folder: Path, parts: list[pa.Table], labels: Labels | None) -> Source:
    names = parts[0].schema.names
    column = next((c for c in PATH_COLUMNS if c in names), None)
    if column is None:
        raise ValueError(
            f"--data {name}: no image column ({', '.join(IMAGE_COLUMNS)}) and no column of paths "
            f"({', '.join(PATH_COLUMNS)}); there are {', '.join(names)}"
        )
    texts: list[Any] = [text for part in parts for text in part[column].to_pylist()]
    empty = [row for row, text in enumerate(texts) if not text or not isinstance(text, str)]
    if empty:
        raise ValueError(f"--data {name}: row {empty[0]} has no path in {column}")
    return list_of_files(name, folder, texts, labels)


def _labels(parts: list[pa.Table]) -> Labels | None:
    column = next((c for c in LABEL_COLUMNS if c in parts[0].schema.names), None)
    if column is None:
        return None
    values = [value for part in parts for value in part[column].to_pylist()]
    names = _class_names(parts[0].schema, column)
    if names and all(isinstance(value, int) for value in values):
        return Labels(np.array([v if 0 <= v < len(names) else -1 for v in values], dtype=np.int64), names)
    return labels_from(Keys("" if value is None else str(value) for value in values))


def _class_names(schema: pa.Schema, column: str) -> list[str]:
    """Hugging Face keeps the names of a ClassLabel in the file's metadata."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[column]["names"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return []
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def _memory_mapped(path: Path) -> pa.Table:
    """Arrow files as they are. Parquet cannot be read at random, so it is unpacked once into an Arrow file."""
    try:
        if path.suffix == ".parquet":
            return _unpacked(path)
        try:
            return read_arrow(path)
        except pa.ArrowInvalid:
            return checked(
                pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
            )  # what `datasets` keeps in its cache
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"--data {path}: not a readable table ({error})") from None


def _unpacked(path: Path) -> pa.Table:
    kept = kept_file(path, "parquet")
    if not kept.is_file():
        file = pq.ParquetFile(path)
        log.info("%s: unpacked once into %s, for access at random", path, kept)
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_arrow(kept, file.schema_arrow, file.iter_batches(batch_size=256))
    return read_arrow(kept)

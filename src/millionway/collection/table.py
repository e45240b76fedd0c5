"""collection.parquet: one line for each image. Its columns are those that embedding-atlas, FiftyOne and pandas open.

neighbors.ids are lines of this file, counted from 0, and neighbors.distances are 1 - cosine, as embedding-atlas asks.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from millionway.collection.looks import Looks
from millionway.collection.neighbors import Neighbors
from millionway.files import replacing

NAME = "collection.parquet"
LINES_PER_GROUP = 16_384
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("path", pa.string()),
        ("label", pa.string()),
        ("x", pa.float32()),
        ("y", pa.float32()),
        ("cluster", pa.int32()),  # null: in none
        ("neighbors", pa.struct([("ids", pa.list_(pa.int64())), ("distances", pa.list_(pa.float32()))])),
        ("outlier_score", pa.float32()),
        ("outlier_reason", pa.string()),
        ("duplicate_group", pa.int32()),  # null: there once
        ("keep", pa.bool_()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("modified", pa.timestamp("us", "UTC")),  # null if nobody knows
        ("thumbnail", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
    ]
)


def neighbors_column(near: Neighbors) -> pa.StructArray:
    num, k = near.places.shape
    offsets = pa.array(np.arange(0, num * k + 1, k) if k else np.zeros(num + 1), pa.int32())
    ids = pa.array(near.places.cpu().numpy().astype(np.int64).ravel())
    distances = pa.array((1 - near.cosines.cpu().numpy()).astype(np.float32).ravel())
    lists = [pa.ListArray.from_arrays(offsets, values) for values in (ids, distances)]
    return pa.StructArray.from_arrays(lists, ["ids", "distances"])


def thumbnail_column(looks: Looks, paths: pa.ChunkedArray) -> pa.ChunkedArray:
    """{bytes, path}, as Hugging Face's `datasets` and embedding-atlas keep images."""
    chunks, start = [], 0
    for chunk in looks.table["thumbnail"].chunks:
        names = paths.slice(start, len(chunk)).combine_chunks()
        chunks.append(pa.StructArray.from_arrays([chunk, names], ["bytes", "path"]))
        start += len(chunk)
    return pa.chunked_array(chunks, SCHEMA.field("thumbnail").type)


def or_null(values: np.ndarray, kind: pa.DataType, known: np.ndarray) -> pa.Array:
    return pa.array(values, kind, mask=~known)


def write_table(path: Path, table: pa.Table, about: dict[str, Any]) -> None:
    """about: what the numbers are made of; it stands in the file's metadata."""
    table = table.replace_schema_metadata({b"millionway": json.dumps(about).encode()})
    with replacing(path) as aside:
        pq.write_table(table, aside, row_group_size=LINES_PER_GROUP, compression="zstd")


def read_about(path: Path) -> dict[str, Any] | None:
    """None unless it is a file of ours, whole and with all columns."""
    try:
        schema = pq.read_schema(path)
        about = json.loads((schema.metadata or {})[b"millionway"])
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return None
    return about if isinstance(about, dict) and schema.names == SCHEMA.names else None

"""The numbered list of images: row = instance_id = class. Written once per run, memory-mapped after that."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from millionway.data.images import UnreadableImage, decode
from millionway.data.source import Labels, Source
from millionway.data.threads import in_order
from millionway.files import replacing

SCHEMA = pa.schema(
    [
        ("instance_id", pa.int64()),
        ("key", pa.string()),
        ("num_bytes", pa.int64()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("content_hash", pa.string()),
        ("label", pa.int32()),
        ("is_test", pa.bool_()),
        ("problem", pa.string()),  # "" if the image is readable
    ]
)


@dataclass(frozen=True)
class Manifest:
    """The list, as an Arrow table in row order. An unreadable image keeps its number and is never visited."""

    table: pa.Table

    def __len__(self) -> int:
        return self.table.num_rows

    def column(self, name: str) -> np.ndarray:
        return self.table[name].to_numpy()

    @cached_property
    def keys(self) -> list[str]:
        return self.table["key"].to_pylist()

    @cached_property
    def readable(self) -> np.ndarray:
        """[images] True where the image can be decoded."""
        return self.column("problem") == ""

    @cached_property
    def problems(self) -> dict[str, str]:
        """key -> reason, for the images that cannot be read."""
        return {self.keys[i]: self.table["problem"][i].as_py() for i in np.flatnonzero(~self.readable)}

    @cached_property
    def labels(self) -> Labels | None:
        names = json.loads((self.table.schema.metadata or {}).get(b"label_names", b"[]"))
        if not names:
            return None
        is_test = self.column("is_test")
        return Labels(self.column("label").astype(np.int64), names, is_test if is_test.any() else None)

    @cached_property
    def fingerprint(self) -> str:
        """Changes when any image, its content or its number changes."""
        digest = hashlib.blake2b(digest_size=16)
        for name in ("key", "content_hash"):
            for value in self.table[name].to_pylist():
                digest.update(value.encode() + b"\0")
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        with (
            replacing(path) as aside,
            pa.OSFile(str(aside), "wb") as sink,
            pa.ipc.new_file(sink, self.table.schema) as writer,
        ):
            writer.write_table(self.table)

    @staticmethod
    def load(path: Path) -> "Manifest":
        if not path.is_file():
            raise ValueError(f"{path}: not a manifest: no such file; `millionway index DATA --out {path}` makes one")
        try:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(f"{path}: not a manifest ({error}). `millionway index` makes one.") from None
        missing = set(SCHEMA.names) - set(table.schema.names)
        if missing:
            raise ValueError(f"{path}: not a manifest of images: columns {sorted(missing)} are missing")
        return Manifest(table)


def build_manifest(
    source: Source, num_threads: int, progress: Callable[[Iterable, int, str], Iterable] | None = None
) -> Manifest:
    """Read, hash and decode every image once; number them in the source's order."""
    rows = in_order(lambda index: _examine(source, index), range(len(source)), num_threads, 64)
    if progress:
        rows = progress(rows, len(source), "indexing")
    num_bytes, widths, heights, hashes, problems = (list(column) for column in zip(*rows))
    labels = source.labels
    none = np.zeros(len(source), dtype=np.int64)
    columns = {
        "instance_id": np.arange(len(source), dtype=np.int64),
        "key": list(source.keys),
        "num_bytes": num_bytes,
        "width": widths,
        "height": heights,
        "content_hash": hashes,
        "label": (labels.ids if labels else none - 1).astype(np.int32),
        "is_test": labels.is_test if labels and labels.is_test is not None else none.astype(bool),
        "problem": problems,
    }
    metadata = {
        "label_names": json.dumps(labels.names if labels else []),
        "source": source.name,
        "version": "1",
    }
    return Manifest(pa.table(columns, schema=SCHEMA.with_metadata(metadata)))


def _examine(source: Source, index: int) -> tuple[int, int, int, str, str]:
    """(bytes, width, height, content hash, problem) of one image; width and height after EXIF rotation."""
    content_hash, num_bytes = "", source.num_bytes(index)
    try:
        data = source.read(index)
        content = data if isinstance(data, bytes) else data.tobytes()
        content_hash = hashlib.blake2b(content, digest_size=16).hexdigest()
        image = decode(data)
        return num_bytes, image.width, image.height, content_hash, ""
    except UnreadableImage as error:
        return num_bytes, 0, 0, content_hash, str(error)


def difference(manifest: Manifest, source: Source) -> str:
    """'' if the source still holds the manifest's images, else which came, went or changed, in words."""
    then = dict(zip(manifest.keys, manifest.column("num_bytes").tolist()))
    now = {key: source.num_bytes(index) for index, key in enumerate(source.keys)}
    came = [key for key in now if key not in then]
    # An image that was unreadable because it was missing has -1 bytes then and now.
    went = [key for key in then if now.get(key, -1) < 0 <= then[key]]
    changed = [key for key in then if now.get(key, -1) >= 0 and now[key] != then[key]]
    parts = [
        f"{len(keys):,} {word} ({', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''})"
        for keys, word in ((came, "came"), (went, "went"), (changed, "changed"))
        if keys
    ]
    return "; ".join(parts)

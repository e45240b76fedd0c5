"""The numbered list of images: row = instance_id = class. Written once per run, memory-mapped after that."""

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from millionway.data.arrow_files import pc, read_arrow, write_arrow
from millionway.data.images import UnreadableImage
from millionway.data.source import Keys, Labels, Source
from millionway.files import BadFile

log = logging.getLogger("millionway")

SCHEMA = pa.schema(
    [
        ("instance_id", pa.int64()),
        ("key", pa.string()),
        ("num_bytes", pa.int64()),
        ("modified", pa.int64()),  # nanoseconds, 0 if nobody knows
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("mode", pa.string()),  # as stored, by Pillow's names
        ("near_empty", pa.bool_()),
        ("content_hash", pa.string()),
        ("label", pa.int32()),
        ("is_test", pa.bool_()),
        ("problem", pa.string()),  # "" if the image is readable
    ]
)

SEAL = b"seal"
DAMAGED = "Put a copy in its place, or make it again with `millionway index`"
REMOVED = "removed"  # the problem of an image that is gone; its number waits for another
NUM_LOOKED_INTO = 32
COPY = "copy of "  # the problem of an image that has the same bytes as another, after --duplicates merge


@dataclass(frozen=True)
class Manifest:
    """The list, as an Arrow table in row order. An unreadable or removed image keeps its number, unvisited."""

    table: pa.Table

    def __len__(self) -> int:
        return self.table.num_rows

    def column(self, name: str) -> np.ndarray:
        return self.table[name].to_numpy()

    @cached_property
    def keys(self) -> Keys:
        return Keys(self.table["key"])

    @cached_property
    def readable(self) -> np.ndarray:
        """[images] True where the image is visited: it can be decoded, is there, and is not a merged copy."""
        return pc.equal(self.table["problem"], "").to_numpy()

    @cached_property
    def removed(self) -> np.ndarray:
        """[images] True where the image is gone."""
        return pc.equal(self.table["problem"], REMOVED).to_numpy()

    @cached_property
    def problems(self) -> dict[str, str]:
        """key -> reason, for the images that cannot be read."""
        rows = np.flatnonzero(~self.readable & ~self.removed & ~self.copies)
        return dict(zip(self.keys.take(rows), self.table["problem"].take(pa.array(rows)).to_pylist()))

    @cached_property
    def copies(self) -> np.ndarray:
        """[images] True where the image has no row of its own because another has the same bytes."""
        return pc.starts_with(self.table["problem"], COPY).to_numpy()

    @cached_property
    def num_duplicates(self) -> int:
        """Readable images whose bytes another readable image has too, all but one of each kind."""
        hashes = self.table["content_hash"].filter(pa.array(self.readable))
        return len(hashes) - len(pc.unique(hashes))

    @cached_property
    def labels(self) -> Labels | None:
        if not self.label_names:
            return None
        is_test = self.column("is_test")
        return Labels(self.column("label").astype(np.int64), self.label_names, is_test if is_test.any() else None)

    @cached_property
    def fingerprint(self) -> str:
        """Changes when an image, its content or its number changes, or who is visited."""
        digest = hashlib.blake2b(np.packbits(self.readable).tobytes(), digest_size=16)
        for name in ("key", "content_hash"):
            for part in _bytes_of(self.table[name]):
                digest.update(part)
        return digest.hexdigest()

    @cached_property
    def label_names(self) -> list[str]:
        return json.loads((self.table.schema.metadata or {}).get(b"label_names", b"[]"))

    def seal(self) -> str:
        """The checksum of all columns and of what the file says about them."""
        about = {name: text for name, text in (self.table.schema.metadata or {}).items() if name != SEAL}
        digest = hashlib.sha256(repr(sorted(about.items())).encode())
        for name in SCHEMA.names:
            column = self.table[name]
            parts = (
                _bytes_of(column)
                if column.type == pa.string()
                else (np.ascontiguousarray(chunk.to_numpy(zero_copy_only=False)).data for chunk in column.chunks)
            )
            for part in parts:
                digest.update(part)
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        metadata = {**(self.table.schema.metadata or {}), SEAL: self.seal().encode()}
        write_arrow(path, self.table.schema.with_metadata(metadata), self.table.to_batches())

    @staticmethod
    def load(path: Path) -> "Manifest":
        if not path.is_file():
            raise BadFile(path, "not a manifest: no such file", f"`millionway index DATA --out {path}` makes one")
        try:
            table = read_arrow(path)
        except (OSError, pa.ArrowException) as error:
            raise BadFile(path, f"not a manifest ({error})", "`millionway index` makes one") from None
        missing = set(SCHEMA.names) - set(table.schema.names)
        if missing and (table.schema.metadata or {}).get(b"version") == b"1":
            raise BadFile(
                path,
                "it was made by an older version",
                "Make it again with `millionway index`; a run goes on as a new one with --init-from, and is evaluated "
                "with --data",
            )
        if missing:
            raise BadFile(path, f"not a manifest of images: columns {sorted(missing)} are missing")
        manifest = Manifest(table)
        problem = manifest._problem()
        if problem:
            raise BadFile(path, f"not a manifest of images: {problem}", DAMAGED)
        kept = (table.schema.metadata or {}).get(SEAL)
        if kept is None:
            log.warning("%s has no seal, so nobody can tell whether it was changed or damaged", path)
        elif kept != manifest.seal().encode():
            raise BadFile(path, "it is not as it was written: its seal is broken", DAMAGED)
        return manifest

    def _problem(self) -> str:
        """What no list of images can be like, or ''."""
        for field in SCHEMA:
            column = self.table[field.name]
            if column.type != field.type or column.null_count:
                return f"column {field.name} is {column.type} with {column.null_count} gaps, not {field.type}"
        try:
            names = self.label_names
        except (ValueError, RecursionError):
            return "its label names are not JSON"
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return "its label names are not texts"
        label, width, height = (self.column(name) for name in ("label", "width", "height"))
        if not np.array_equal(self.column("instance_id"), np.arange(len(self))):
            return "its rows are not numbered from 0 on"
        if len(label) and not (label.min() >= -1 and label.max() < max(1, len(names))):
            return f"labels from {label.min()} to {label.max()}, and {len(names)} names"
        if not ((width > 0) & (height > 0))[self.readable].all():
            return "it has readable images without pixels"
        return ""


def _bytes_of(column: pa.ChunkedArray) -> Iterator[memoryview]:
    """The letters and the lengths of all texts, whatever chunks they are in."""
    ends = []
    for chunk in column.chunks:
        _, offsets, letters = chunk.buffers()
        if letters is not None and len(chunk):
            places = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
            yield memoryview(letters)[places[0] : places[-1]]
            ends.append(np.diff(places).data)
    yield from ends


def content_hash(source: Source, place: int) -> str:
    """'' if it cannot be read."""
    try:
        data = source.read(place)
    except UnreadableImage:
        return ""
    return hash_of(data)


def hash_of(data: bytes | np.ndarray) -> str:
    return hashlib.blake2b(data if isinstance(data, bytes) else data.data, digest_size=16).hexdigest()


def difference(manifest: Manifest, source: Source, places: np.ndarray, ask_all: bool = True) -> str:
    """'' if the source still holds the manifest's images, else which came, went or changed, in words.

    places: [images] where each key of the manifest is in the source, -1 if nowhere. ask_all: compare the size of each
    image; if not, that of those that are looked into.
    """
    then = np.where(manifest.removed, -1, manifest.column("num_bytes"))
    now, listed = np.where(places >= 0, then, -1), np.flatnonzero(places >= 0)
    if not ask_all:
        listed = listed[:: max(1, len(listed) // NUM_LOOKED_INTO)]
    now[listed] = source.statuses(places[listed])[:, 0]
    # Images of an array all have the same size, so some are looked into.
    there = np.flatnonzero(manifest.readable & (now >= 0) & (now == then))
    for row in there[:: max(1, len(there) // NUM_LOOKED_INTO)]:
        if content_hash(source, int(places[row])) != manifest.table["content_hash"][int(row)].as_py():
            now[row] = then[row] + 1
    came = np.setdiff1d(np.arange(len(source)), places[~manifest.removed])
    parts = [
        f"{len(keys):,} {word} ({', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''})"
        for keys, word in (
            (source.keys.take(came), "came"),
            # An image that was unreadable because it was missing has -1 bytes then and now.
            (manifest.keys.take(np.flatnonzero((now < 0) & (then >= 0))), "went"),
            (manifest.keys.take(np.flatnonzero((now >= 0) & (then >= 0) & (now != then))), "changed"),
        )
        if len(keys)
    ]
    return "; ".join(parts)

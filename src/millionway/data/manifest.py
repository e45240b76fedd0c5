"""The numbered list of images: row = instance_id = class. Written once per run, memory-mapped after that."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from millionway.data.arrow_files import read_arrow, write_arrow
from millionway.data.images import UnreadableImage, decode
from millionway.data.source import Labels, Source
from millionway.data.threads import in_order

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


REMOVED = "removed"  # the problem of an image that is gone; its number waits for another


@dataclass(frozen=True)
class Manifest:
    """The list, as an Arrow table in row order. An unreadable or removed image keeps its number, unvisited."""

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
        reasons = {self.keys[i]: self.table["problem"][i].as_py() for i in np.flatnonzero(~self.readable)}
        return {key: reason for key, reason in reasons.items() if reason != REMOVED}

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
        digest.update(np.flatnonzero(self.column("problem") == REMOVED).tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        write_arrow(path, self.table.schema, self.table.to_batches())

    @staticmethod
    def load(path: Path) -> "Manifest":
        if not path.is_file():
            raise ValueError(f"{path}: not a manifest: no such file; `millionway index DATA --out {path}` makes one")
        try:
            table = read_arrow(path)
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


@dataclass(frozen=True)
class Changes:
    """What happened to the images since a list was made."""

    manifest: Manifest
    """the new list: who stayed keeps its number, who went is marked, who came has a free number or one at the end"""
    new_ids: np.ndarray
    """[new or changed images] whose rows must be written"""
    num_removed: int
    num_renamed: int

    def __str__(self) -> str:
        return f"{len(self.new_ids):,} new or changed, {self.num_removed:,} removed, {self.num_renamed:,} renamed"


def update_manifest(
    old: Manifest,
    source: Source,
    num_threads: int,
    progress: Callable[[Iterable, int, str], Iterable] | None = None,
) -> Changes:
    """The list of the same images as they are now. Order does not matter; a renamed image is known by its content."""
    then = {key: row for row, key in enumerate(old.keys) if old.table["problem"][row].as_py() != REMOVED}
    sizes, hashes = old.column("num_bytes"), old.table["content_hash"].to_pylist()
    place_of: dict[int, int] = {}  # number -> place in the source
    unknown = []
    for place, key in enumerate(source.keys):
        row = then.get(key)
        if row is not None and source.num_bytes(place) == sizes[row]:
            place_of[row] = place
        else:
            unknown.append(place)
    rows = in_order(lambda place: _examine(source, place), unknown, num_threads, 64)
    examined = dict(zip(unknown, progress(rows, len(unknown), "indexing new images") if progress else rows))
    gone_by_hash = {hashes[row]: row for row in then.values() if row not in place_of and hashes[row]}
    new_places, num_renamed = [], 0
    for place in unknown:
        row = gone_by_hash.pop(examined[place][3], None)
        if row is not None:
            place_of[row] = place
            num_renamed += 1
        else:
            new_places.append(place)
    # A changed file keeps its number if it can; other new ones take those of removed images, then new ones.
    new_ids, waiting = {}, []
    for place in new_places:
        row = then.get(str(source.keys[place]))
        if row is not None and row not in place_of:
            new_ids[row] = place
        else:
            waiting.append(place)
    free = [row for row in range(len(old)) if row not in place_of and row not in new_ids]
    numbers = [*free, *range(len(old), len(old) + max(0, len(waiting) - len(free)))]
    new_ids |= dict(zip(numbers, waiting))
    place_of |= new_ids
    manifest = _renumbered(old, source, place_of, examined, max(len(old), 1 + max(place_of, default=-1)))
    num_removed = sum(row not in place_of for row in then.values())
    num_removed += sum(row in new_ids and source.keys[new_ids[row]] != key for key, row in then.items())
    return Changes(manifest, np.array(sorted(new_ids), dtype=np.int64), num_removed, num_renamed)


def _renumbered(
    old: Manifest, source: Source, place_of: dict[int, int], examined: dict[int, tuple], num: int
) -> Manifest:
    columns: dict[str, list] = {name: old.table[name].to_pylist() for name in SCHEMA.names}
    for values in columns.values():
        values += [None] * (num - len(values))
    labels = source.labels
    for row in range(num):
        columns["instance_id"][row] = row
        place = place_of.get(row)
        columns["label"][row] = -1 if place is None or labels is None else int(labels.ids[place])
        is_test = None if labels is None else labels.is_test
        columns["is_test"][row] = False if place is None or is_test is None else bool(is_test[place])
        if place is None:
            columns["num_bytes"][row], columns["problem"][row] = -1, REMOVED
            continue
        columns["key"][row] = source.keys[place]
        if place in examined:
            names = ("num_bytes", "width", "height", "content_hash", "problem")
            for name, value in zip(names, examined[place]):
                columns[name][row] = value
    metadata = dict(old.table.schema.metadata or {})
    metadata[b"label_names"] = json.dumps(labels.names if labels else []).encode()
    return Manifest(pa.table(columns, schema=SCHEMA.with_metadata(metadata)))


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

"""Making the numbered list: every image is read, hashed and decoded once; and again only if it has changed."""

import json
import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from millionway.data.arrow_files import pc
from millionway.data.images import SEVERAL_FRAMES, UnreadableImage, decode_with_mode, is_near_empty
from millionway.data.manifest import COPY, REMOVED, SCHEMA, Manifest, hash_of
from millionway.data.readers import Progress, in_calls
from millionway.data.source import Keys, Source
from millionway.settings.pretrain import Duplicates

log = logging.getLogger("millionway")


ROWS_PER_BATCH, BATCH_SECONDS = 8192, 2.0  # what an interruption may cost


class Examined(NamedTuple):
    """What is known of an image after one look. Width and height are those after EXIF rotation."""

    num_bytes: int
    modified: int
    width: int = 0
    height: int = 0
    mode: str = ""
    near_empty: bool = False
    content_hash: str = ""
    problem: str = ""


EXAMINED = pa.schema([SCHEMA.field("key"), *(SCHEMA.field(name) for name in Examined._fields)])


def examine(source: Source, places: np.ndarray) -> list[tuple]:
    """Examined, as plain tuples, which travel faster between processes."""
    return [tuple(_examine(source, place)) for place in places.tolist()]


def _examine(source: Source, place: int) -> Examined:
    num_bytes, modified = source.statuses(np.array([place]))[0].tolist()
    content_hash = ""
    try:
        data = source.read(place)
        content_hash = hash_of(data)
        image, mode = decode_with_mode(data)
        near_empty = is_near_empty(image)
        return Examined(num_bytes, modified, image.width, image.height, mode, near_empty, content_hash)
    except UnreadableImage as error:
        return Examined(num_bytes, modified, content_hash=content_hash, problem=str(error))


def _examined(
    source: Source, places: np.ndarray, num_workers: int, progress: Progress | None
) -> Iterator[pa.RecordBatch]:
    """Batches of (key, what is known), in the order of the places."""
    found, _ = in_calls(partial(examine, source), places, num_workers, source.shareable)
    rows = (row for rows in found for row in rows)
    waiting, start, last = [], 0, time.monotonic()
    for row in progress(rows, len(places), "indexing") if progress else rows:
        waiting.append(row)
        is_due = len(waiting) == ROWS_PER_BATCH or time.monotonic() - last > BATCH_SECONDS
        if is_due or start + len(waiting) == len(places):
            keys = source.keys.take(places[start : start + len(waiting)]).arrow.combine_chunks()
            yield pa.record_batch([keys, *zip(*waiting)], schema=EXAMINED)
            start, last = start + len(waiting), time.monotonic()
            waiting = []


@dataclass(frozen=True)
class Changes:
    """What happened to the images since a list was made."""

    manifest: Manifest
    """the new list: who stayed keeps its number, who went is marked, who came has a free number or one at the end"""
    new_ids: np.ndarray
    """[new or changed images] that can be read; their rows must be written"""
    num_removed: int
    num_renamed: int
    nothing_stayed: bool
    """the list had images, and none of them is here, under whatever name"""

    def __str__(self) -> str:
        return f"{len(self.new_ids):,} new or changed, {self.num_removed:,} removed, {self.num_renamed:,} renamed"


def build_manifest(
    source: Source, num_workers: int, progress: Progress | None = None, duplicates: Duplicates = "report"
) -> Manifest:
    """All images, numbered in the source's order."""
    return update_manifest(Manifest(SCHEMA.empty_table()), source, num_workers, progress, duplicates).manifest


def update_manifest(
    old: Manifest,
    source: Source,
    num_workers: int,
    progress: Progress | None = None,
    duplicates: Duplicates = "report",
    begun: Path | None = None,
) -> Changes:
    """The list of the same images as they are now. Order does not matter; a renamed image is known by its content.

    begun: where to keep what is known so far, for a next time if this is interrupted.
    """
    row_of = _rows_of(old, source)  # [places] the number each had, -1 if it is new
    same = _unchanged(old, source, row_of)
    unknown = np.flatnonzero(~same)
    examined = _examine_all(source, unknown, num_workers, progress, begun)
    place_of = np.full(len(old), -1)  # [numbers] the place of each in the source, -1 if it is gone
    place_of[row_of[same]] = np.flatnonzero(same)
    num_renamed = _recognize(old, unknown, row_of, examined, place_of)
    # A changed file keeps its number if it can; other new ones take those of removed images, then new ones.
    new = np.setdiff1d(unknown, place_of)
    changed = new[row_of[new] >= 0]
    changed = changed[place_of[row_of[changed]] < 0]
    place_of[row_of[changed]] = changed
    waiting = np.setdiff1d(new, changed)
    free = np.flatnonzero(place_of < 0)[: len(waiting)]
    place_of[free] = waiting[: len(free)]
    place_of = np.concatenate([place_of, waiting[len(free) :]])

    is_new = np.isin(place_of, new)
    gone = ~old.removed & (is_new | (place_of < 0))[: len(old)]
    gone[row_of[changed]] = False
    was_visited = np.zeros(len(place_of), dtype=bool)
    was_visited[: len(old)] = old.readable & ~is_new[: len(old)]
    manifest = Manifest(_table(old, source, place_of, unknown, examined))
    if duplicates == "merge" or (duplicates == "report" and old.copies.any()):  # what was merged stays merged
        manifest = Manifest(_merged(manifest.table, was_visited))
    new_ids = np.flatnonzero(manifest.readable & ~was_visited)
    num_before = int((~old.removed).sum())
    return Changes(manifest, new_ids, int(gone.sum()), num_renamed, 0 < num_before == int(gone.sum()))


def index(
    source: Source, out: Path, num_workers: int, progress: Progress | None = None, duplicates: Duplicates = "report"
) -> Changes:
    """Write the list, or bring the one that is there up to date. An interrupted attempt is not lost."""
    old = Manifest.load(out) if out.exists() else Manifest(SCHEMA.empty_table())
    out.parent.mkdir(parents=True, exist_ok=True)
    begun = out.with_name(out.name + ".partial")
    changes = update_manifest(old, source, num_workers, progress, duplicates, begun)
    if changes.nothing_stayed:
        raise ValueError(f"{out} lists other images, none of {source.name}; give another --out")
    changes.manifest.save(out)
    begun.unlink(missing_ok=True)
    return changes


def report_oddities(manifest: Manifest, duplicates: Duplicates) -> None:
    """Say what may be wrong with the images, though they can be read."""
    if manifest.copies.any():
        log.info("%d images are exact copies of others and have no row of their own", manifest.copies.sum())
    if duplicates == "report" and manifest.num_duplicates:
        log.warning(
            "%d images are exact copies of others: two rows for one picture tell it from itself. "
            "--duplicates merge gives them one row, --duplicates keep leaves them without this message",
            manifest.num_duplicates,
        )
    num_several = sum(mode.endswith(SEVERAL_FRAMES) for mode in manifest.column("mode")[manifest.readable])
    if num_several:
        log.info("%d images have several frames or pages: the first one is taken", num_several)
    empty = np.flatnonzero(manifest.column("near_empty") & manifest.readable)
    if len(empty):
        names = ", ".join(manifest.keys.take(empty[:5])) + (", ..." if len(empty) > 5 else "")
        log.warning("%d images show almost nothing: %s", len(empty), names)


def _rows_of(old: Manifest, source: Source) -> np.ndarray:
    rows = np.flatnonzero(~old.removed)
    if len(rows) == 0:
        return np.full(len(source), -1)
    places = old.keys.take(rows).places_of(source.keys)
    return np.where(places >= 0, rows[places], -1)


def _unchanged(old: Manifest, source: Source, row_of: np.ndarray) -> np.ndarray:
    """[places] True where size and time of writing are what they were."""
    places = np.flatnonzero(row_of >= 0)
    now = source.statuses(places)
    then = np.stack([old.column(name)[row_of[places]] for name in ("num_bytes", "modified")], axis=1)
    same = np.zeros(len(source), dtype=bool)
    same[places] = (now[:, 0] == then[:, 0]) & ((now[:, 1] == then[:, 1]) | (now[:, 1] == 0) | (then[:, 1] == 0))
    return same


def _examine_all(
    source: Source, places: np.ndarray, num_workers: int, progress: Progress | None, begun: Path | None
) -> pa.Table:
    """[places] what is known of them. With `begun`, what an interrupted attempt found out counts, if still true."""
    if begun is None:
        return pa.Table.from_batches(_examined(source, places, num_workers, progress), EXAMINED)
    before = _whole_batches(begun)
    known = Keys(before["key"]).places_of(source.keys.take(places))
    then = np.stack([before[name].to_numpy() for name in ("num_bytes", "modified")], axis=1)
    found = np.flatnonzero(known >= 0)
    is_other = (source.statuses(places[found]) != then[known[found]]).any(axis=1)
    known[found[is_other]] = -1
    use, left = before.take(pa.array(known[known >= 0])), places[known < 0]
    if len(use):
        log.info("%d images were examined before it was interrupted", len(use))
    begun.unlink(missing_ok=True)  # `before` is a map of it
    with pa.OSFile(str(begun), "wb") as sink, pa.ipc.new_stream(sink, EXAMINED) as writer:
        writer.write_table(use)
        for batch in _examined(source, left, num_workers, progress):
            writer.write_batch(batch)
    if len(use) == 0:
        return _whole_batches(begun)  # by the map, not from memory
    order = np.argsort(np.concatenate([np.flatnonzero(known >= 0), np.flatnonzero(known < 0)]))
    return _whole_batches(begun).take(pa.array(order))


def _whole_batches(path: Path) -> pa.Table:
    """What is there of a stream that may have been cut off."""
    batches = []
    try:
        reader = pa.ipc.open_stream(pa.memory_map(str(path)))
        while reader.schema.equals(EXAMINED):
            batch = reader.read_next_batch()
            batch.validate(full=True)
            batches.append(batch)
    except (StopIteration, OSError, pa.ArrowException):
        pass
    return pa.Table.from_batches(batches, EXAMINED)


def _recognize(old: Manifest, unknown: np.ndarray, row_of: np.ndarray, examined: pa.Table, place_of: np.ndarray) -> int:
    """Who has the content of an image of the list takes its number: the same name first, then renamed ones."""
    if len(old) == 0 or len(unknown) == 0:
        return 0
    then, now = old.table["content_hash"], examined["content_hash"].to_numpy()
    touched = np.flatnonzero(row_of[unknown] >= 0)
    rows = row_of[unknown[touched]]
    equal = (then.take(pa.array(rows)).to_numpy() == now[touched]) & (now[touched] != "")
    place_of[rows[equal]] = unknown[touched[equal]]
    gone = np.flatnonzero((place_of < 0) & ~old.removed)
    gone = gone[np.argsort(~old.readable[gone], kind="stable")]  # of copies, the one that has a trained row first
    rows_with: dict[str, deque[int]] = {}
    for row, text in zip(gone, then.take(pa.array(gone)).to_pylist()):
        rows_with.setdefault(text, deque()).append(row)
    rows_with.pop("", None)
    num_renamed = 0
    for place, text in zip(np.delete(unknown, touched[equal]), np.delete(now, touched[equal])):
        if rows_with.get(text):
            place_of[rows_with[text].popleft()] = place
            num_renamed += 1
    return num_renamed


def _table(old: Manifest, source: Source, place_of: np.ndarray, unknown: np.ndarray, examined: pa.Table) -> pa.Table:
    """Every row as it was, or as it was examined now."""
    num, removed = len(place_of), place_of < 0
    where = np.searchsorted(unknown, place_of)  # [numbers] in `examined`, for those that are
    is_examined = ~removed & np.isin(place_of, unknown)
    take = np.where(is_examined, len(old) + where, np.arange(num))
    known = examined
    if len(old):
        known = pa.concat_tables([old.table.select(EXAMINED.names), examined]).take(pa.array(take))
    problem = pc.if_else(pc.starts_with(known["problem"], COPY), "", known["problem"])
    if removed.any():
        known = known.set_column(1, EXAMINED.field("num_bytes"), pc.if_else(pa.array(removed), -1, known["num_bytes"]))
        problem = pc.if_else(pa.array(removed), REMOVED, problem)
    labels = source.labels
    label, is_test = np.full(num, -1, dtype=np.int32), np.zeros(num, dtype=bool)
    if labels is not None:
        label[~removed] = labels.ids[place_of[~removed]]
        if labels.is_test is not None:
            is_test[~removed] = labels.is_test[place_of[~removed]]
    columns = {name: known[name] for name in EXAMINED.names}
    columns |= {"instance_id": np.arange(num), "label": label, "is_test": is_test, "problem": problem}
    metadata = {"label_names": json.dumps(labels.names if labels else []), "source": source.name, "version": "2"}
    return pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA.with_metadata(metadata))


def _merged(table: pa.Table, was_visited: np.ndarray) -> pa.Table:
    """Of images with the same bytes one is visited: the one that was, or the first."""
    rows = np.flatnonzero(pc.equal(table["problem"], "").to_numpy())
    kinds = Keys(table["content_hash"]).take(rows).arrow.combine_chunks().dictionary_encode().indices.to_numpy()
    order = np.lexsort((rows, ~was_visited[rows]))
    _, first = np.unique(kinds[order], return_index=True)
    owner = rows[order[first]][kinds]  # [rows]
    is_copy = owner != rows
    if not is_copy.any():
        return table
    names = pc.binary_join_element_wise(COPY, Keys(table["key"]).take(owner[is_copy]).arrow, "")
    mask = np.zeros(table.num_rows, dtype=bool)
    mask[rows[is_copy]] = True
    problem = pc.replace_with_mask(table["problem"].combine_chunks(), mask, names.combine_chunks())
    return table.set_column(SCHEMA.get_field_index("problem"), SCHEMA.field("problem"), problem)

"""The images of a collection: those of a run as they are now, or any others."""

import logging
import os
from pathlib import Path

import numpy as np
import pyarrow as pa

from millionway.data.dataset import Dataset, open_dataset
from millionway.data.kinds.choose import open_source
from millionway.data.kinds.folders import FileSource
from millionway.data.manifest import REMOVED, Manifest, difference, hash_of
from millionway.data.readers import Progress
from millionway.data.source import Part, Source
from millionway.data.stores import open_store
from millionway.files import write_whole
from millionway.settings.stored import run_settings

log = logging.getLogger("millionway")


def open_run(
    run: Path, data: str | None, data_root: Path | None, num_threads: int, progress: Progress | None
) -> tuple[Dataset, str]:
    """(the images of a run's list that are still there, that list's fingerprint). data: where they are now."""
    stored = run_settings(run)
    name = data or stored.data
    source = open_source(name, data_root or stored.images.data_root, max_images=stored.images.max_images)
    manifest = Manifest.load(run / "manifest.arrow")
    fingerprint = manifest.fingerprint
    places = source.keys.places_of(manifest.keys)
    if not (places >= 0).any() and data is not None:
        log.info("%s has none of the images that %s was trained on: they are looked at as new ones", data, run)
        return open_images(data, data_root, num_threads, progress), ""
    if not (places >= 0).any():
        raise ValueError(f"none of the images of {run} is in {name}; say with --data where they are now")
    changes = difference(manifest, source, places)
    if changes:
        log.warning("%s is not what %s was trained on: %s. What went is left out.", name, run, changes)
        manifest = _without(manifest, places, changes)
    if manifest.keys != source.keys:
        source = Part(source, places, manifest.keys, manifest.labels)
    if stored.images.labels == "none":
        manifest = _without_labels(manifest)
    # What cannot be read is said and left out, however much it is: nothing is trained here.
    return Dataset(source, manifest, open_store(source, manifest, num_threads, 1.0, progress)), fingerprint


def open_images(
    data: str, data_root: Path | None, num_threads: int, progress: Progress | None, test: bool = False
) -> Dataset:
    return open_dataset(
        data, data_root, test=test, num_threads=num_threads, max_unreadable=1.0, duplicates="keep", progress=progress
    )


def _without(manifest: Manifest, places: np.ndarray, changes: str) -> Manifest:
    problems = np.where((places < 0) & manifest.readable, REMOVED, manifest.table["problem"].to_numpy())
    table = manifest.table.set_column(
        manifest.table.schema.get_field_index("problem"), "problem", pa.array(problems, pa.string())
    )
    # Features of changed images must not be kept as those of the old ones.
    mark = hash_of(f"{manifest.fingerprint}, {changes}".encode()).encode()
    return Manifest(table.replace_schema_metadata({**(table.schema.metadata or {}), b"fingerprint": mark}))


def _without_labels(manifest: Manifest) -> Manifest:
    metadata = {**(manifest.table.schema.metadata or {}), b"label_names": b"[]"}
    return Manifest(manifest.table.replace_schema_metadata(metadata))


def paths_of(source: Source, ids: np.ndarray) -> list[str]:
    """Whole paths where the images are files, else their keys."""
    if isinstance(source, Part):
        inner = paths_of(source.source, source.places[ids].clip(0))
        return [path if place >= 0 else source.keys[i] for path, place, i in zip(inner, source.places[ids], ids)]
    if isinstance(source, FileSource):
        return [os.path.abspath(source.path(int(i))) for i in ids]
    return list(source.keys.take(ids))


def are_files(source: Source) -> bool:
    return isinstance(source.source if isinstance(source, Part) else source, FileSource)


def write_list(path: Path, paths: list[str]) -> None:
    """A list that `pretrain --data` takes; a name that no line can hold is said and left out."""
    good = [each for each in paths if each.isprintable() and each == each.strip() and _is_unicode(each)]
    if len(good) < len(paths):
        log.warning("%s: %d images have names that a list cannot hold and are left out", path, len(paths) - len(good))
    write_whole(path, "".join(each + "\n" for each in good))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
        return True
    except UnicodeEncodeError:
        return False

"""Source, manifest and pixels, opened together and checked before any long work."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millionway.data.indexing import build_manifest, report_oddities
from millionway.data.kinds.choose import has_test_split, open_source
from millionway.data.manifest import Manifest, difference
from millionway.data.readers import Progress
from millionway.data.source import Labels, Part, Source, some_of
from millionway.data.stores import Store, open_store
from millionway.settings.pretrain import Duplicates

log = logging.getLogger("millionway")


@dataclass(frozen=True)
class Dataset:
    """Images by instance id."""

    source: Source
    manifest: Manifest
    store: Store

    @property
    def instance_ids(self) -> Tensor:
        """The ids of the readable images, ascending: [readable] int64."""
        return torch.from_numpy(np.flatnonzero(self.manifest.readable))

    @property
    def labels(self) -> Labels | None:
        return self.manifest.labels

    def small_side(self) -> int | None:
        """The longer side, if all images are of one size of up to 64 px."""
        heights, widths = self.store.heights[self.instance_ids], self.store.widths[self.instance_ids]
        alike = bool((heights == heights[0]).all() and (widths == widths[0]).all())
        side = int(max(heights[0], widths[0]))
        return side if alike and side <= 64 else None


def open_dataset(
    data: str,
    data_root: Path | None = None,
    manifest_path: Path | None = None,
    *,
    source: Source | None = None,
    test: bool = False,
    max_images: int | None = None,
    num_threads: int = 2,
    max_unreadable: float = 0.01,
    duplicates: Duplicates = "keep",
    progress: Progress | None = None,
    ask_all: bool = True,
) -> Dataset:
    """manifest_path: a list made before; the images must still be those, and are not examined again.

    source: the data, if it is open already. ask_all: ask the disk for the size of every listed image, not of some.
    """
    source = source or open_source(data, data_root, test, max_images)
    if manifest_path is not None:
        manifest = Manifest.load(manifest_path)
        places = source.keys.places_of(manifest.keys)
        if not (places >= 0).any():
            raise ValueError(f"none of the images of {manifest_path} is in {data}: it is another data set")
        if duplicates == "merge" and manifest.num_duplicates:
            raise ValueError(
                f"{manifest_path} has {manifest.num_duplicates:,} copies with rows of their own; merge them with "
                "`millionway index --duplicates merge` and the same --out, or leave out --duplicates merge"
            )
        changes = difference(manifest, source, places, ask_all)
        if changes:
            raise ValueError(
                f"the images of {data} are not those of {manifest_path}: {changes}. Row i belongs to image i, so "
                "put the images back; or go on with --resume, where --data-changed takes them over; or start a new run."
            )
        if manifest.keys != source.keys:
            source = Part(source, places, manifest.keys, manifest.labels)
    else:
        manifest = build_manifest(source, num_threads, progress, duplicates)
        report_oddities(manifest, duplicates)
    check_readable(manifest, data, max_unreadable)
    return Dataset(source, manifest, open_store(source, manifest, num_threads, max_unreadable, progress))


def open_some(
    data: str, data_root: Path | None, at_most: int, num_threads: int, progress: Progress | None
) -> tuple[Dataset, int]:
    """(some of the images, how many there are in all); their pixels are kept where those of all would be."""
    source = open_source(data, data_root)
    some = some_of(source, at_most)
    manifest = build_manifest(some, num_threads, progress)
    check_readable(manifest, data, 1.0)
    store = open_store(some, manifest, num_threads, 1.0, progress, len(source))
    return Dataset(some, manifest, store), len(source)


def has_test_images(data: str, test_data: str | None) -> bool:
    """Whether there are images to ask with, beside those that are learned from."""
    return test_data is not None or has_test_split(data)


def open_test(data: str, test_data: str | None, data_root: Path | None, **options: Any) -> Dataset | None:
    """The query images: those given, or the data's own test split, if it has one."""
    name = test_data or data
    if not has_test_images(data, test_data):
        return None
    return open_dataset(name, data_root, test=has_test_split(name), **options)


def check_readable(manifest: Manifest, data: str, max_unreadable: float) -> None:
    """Report images that cannot be read; refuse if they are too many."""
    problems = manifest.problems
    for key, problem in list(problems.items())[:10]:
        log.warning("unreadable: %s: %s", key, problem)
    if len(problems) > 10:
        log.warning("... and %d more", len(problems) - 10)
    if len(problems) == len(manifest):
        raise ValueError(f"--data {data}: none of its {len(manifest):,} images can be read")
    if len(problems) > max_unreadable * len(manifest):
        raise ValueError(
            f"--data {data}: {len(problems):,} of {len(manifest):,} images cannot be read. "
            f"Repair or remove them, or allow it with --max-unreadable "
            f"{min(1.0, np.ceil(100 * len(problems) / len(manifest)) / 100):g}"
        )
    if problems:
        log.warning("%d of %d images cannot be read and are skipped", len(problems), len(manifest))

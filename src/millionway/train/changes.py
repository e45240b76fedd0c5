"""Images that came, went or were renamed while a run was away."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from millionway.config import Pretrain
from millionway.console import track
from millionway.data.indexing import report_oddities, update_manifest
from millionway.data.manifest import Manifest
from millionway.data.sources import open_source
from millionway.parallel.collectives import first_alone, tell_everybody
from millionway.parallel.group import Group
from millionway.train.checkpoint import newest_fingerprint

log = logging.getLogger("millionway")

MANIFEST = "manifest.arrow"
CHANGED = "manifest.changed.arrow"
"""the list as it will be; it takes the other's name when a checkpoint for it is complete"""


@dataclass(frozen=True)
class Before:
    """What the run knew when it stopped, and what is new."""

    num_instances: int
    num_readable: int
    fingerprint: str
    new_ids: Tensor
    words: str

    def steps_per_epoch(self, batch_size: int) -> int:
        return max(1, self.num_readable // batch_size)


def changed_images(config: Pretrain, group: Group, run: Path) -> Before | None:
    """Write the new list beside the old one; None if nothing has changed, or nobody asked."""
    first_alone(group, lambda: finish_change(run))
    if not config.data_changed:
        return None
    before = first_alone(group, lambda: _compare(config, run))
    return tell_everybody(group, before)[0]


def _compare(config: Pretrain, run: Path) -> Before | None:
    old = Manifest.load(run / MANIFEST)
    source = open_source(config.data, config.images.data_root, max_images=config.images.max_images)
    changes = update_manifest(old, source, torch.get_num_threads(), track, config.images.duplicates)
    if changes.nothing_stayed:
        raise ValueError(f"--data-changed: none of the run's images is in {config.data}: it is another data set")
    report_oddities(changes.manifest, config.images.duplicates)
    if changes.manifest.fingerprint == old.fingerprint:
        log.info("--data-changed: the images are the same as before")
        return None
    changes.manifest.save(run / CHANGED)
    new_ids = torch.from_numpy(changes.new_ids)
    return Before(len(old), int(old.readable.sum()), old.fingerprint, new_ids, str(changes))


def accept_change(run: Path) -> None:
    os.replace(run / CHANGED, run / MANIFEST)


def finish_change(run: Path) -> None:
    """A start that was interrupted: if a checkpoint for the new list is there, the list counts; else it goes."""
    if not (run / CHANGED).is_file():
        return
    if newest_fingerprint(run / "checkpoints") == Manifest.load(run / CHANGED).fingerprint:
        accept_change(run)
    else:
        (run / CHANGED).unlink()

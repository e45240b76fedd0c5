"""Images that came, went or were renamed while a run was away."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from millionway.console import track
from millionway.data.batches import plain_batches
from millionway.data.dataset import Dataset
from millionway.data.indexing import report_oddities, update_manifest
from millionway.data.kinds.choose import open_source
from millionway.data.manifest import Manifest
from millionway.model.encoder import EncoderSpec
from millionway.parallel.collectives import all_gather_object, all_gather_uneven, all_reduce, on_first_rank
from millionway.parallel.group import Group
from millionway.run_folder import MANIFEST
from millionway.settings.pretrain import Pretrain
from millionway.train import checkpoint
from millionway.train.checkpoint import newest_fingerprint
from millionway.train.setup import build
from millionway.train.state import State

log = logging.getLogger("millionway")

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
    on_first_rank(group, lambda: finish_change(run))
    if not config.data_changed:
        return None
    before = on_first_rank(group, lambda: _compare(config, run))
    return all_gather_object(group, before)[0]


@contextmanager
def nothing_left_behind(group: Group, run: Path) -> Iterator[None]:
    """Within it, a refused start takes its list of images with it."""
    try:
        yield
    except ValueError:
        if group.is_first:
            (run / CHANGED).unlink(missing_ok=True)
        raise


def _compare(config: Pretrain, run: Path) -> Before | None:
    if config.images.max_images is not None:
        raise ValueError("--data-changed: --max-images would choose other images now; start a new run (--init-from)")
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


def take_over(
    config: Pretrain, dataset: Dataset, old: State, spec: EncoderSpec, before: Before, steps_per_epoch: int, run: Path
) -> State:
    """Rows and momentum of images that stayed, the prior for those that came; from the start of the epoch."""
    assert config.training.batch_size
    classifier, batch_size = old.classifier, config.training.batch_size
    epoch = old.step // before.steps_per_epoch(batch_size)
    state, _ = build(config, dataset, classifier.weight.device, classifier.group)
    take_state(state, old)
    state.step = state.classifier.step = epoch * steps_per_epoch
    write_new_rows(state, dataset, before.new_ids, spec.image_size, batch_size)
    if state.hardest is not None:
        state.hardest = state.classifier.hardest(state.hardest.shape[1])
    # The checkpoint and the list belong together: an interruption between them is repaired by the next start.
    checkpoint.save(run / "checkpoints", state, dataset.manifest.fingerprint, config.running.keep)
    on_first_rank(classifier.group, lambda: accept_change(run))
    log.info("the images changed (%s); going on with epoch %d", before.words, epoch + 1)
    return state


@torch.no_grad()
def take_state(state: State, old: State) -> None:
    """Network with its momentum, and the rows of images that stayed."""
    state.network.load_state_dict(old.network.state_dict())
    for mine, theirs in zip(state.network.parameters(), old.network.parameters()):
        if theirs in old.optimizer.state:
            state.optimizer.state[mine] = old.optimizer.state[theirs]
    state.classifier.take_rows(old.classifier)


@torch.no_grad()
def write_new_rows(state: State, dataset: Dataset, new_ids: Tensor, image_size: int, batch_size: int) -> None:
    """As the prior does it, with the encoder as it is now; as long as the other rows are on average.

    new_ids: of readable images. Each rank encodes its share of a batch.
    """
    classifier, device = state.classifier, state.classifier.weight.device
    start, stop = classifier.local_range
    fresh = torch.zeros(len(classifier.weight), dtype=torch.bool, device=device)
    fresh[new_ids[(new_ids >= start) & (new_ids < stop)].to(device) - start] = True
    classifier.momentum[fresh] = 0
    if len(new_ids) == 0:
        return
    kept = classifier.weight[~fresh & classifier.alive].float().norm(dim=1)
    sums = all_reduce(classifier.group, torch.stack([kept.sum(), torch.tensor(float(len(kept)), device=device)]))
    length = float(sums[0] / sums[1].clamp(min=1)) or 1.0
    network = state.network.eval()
    group, own_size = classifier.group, batch_size // classifier.group.size
    num = -(-len(new_ids) // group.size)
    ids = group.own_part(new_ids[torch.arange(num * group.size) % len(new_ids)])  # filled up, so that all have as many
    images = plain_batches(dataset.store, ids, image_size, own_size, device)
    for pictures, read_ids in track(images, -(-num // own_size), "rows of new images"):
        rows = all_gather_uneven(group, network(pictures).float())
        classifier.set_rows(all_gather_uneven(group, read_ids), length * F.normalize(rows))
    network.train()


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

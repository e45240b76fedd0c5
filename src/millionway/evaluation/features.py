"""Images -> features, and the split of labeled images that protocols are scored on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from millionway import randomness
from millionway.data.batches import plain_batches, view_batches
from millionway.data.dataset import Dataset
from millionway.data.readers import Progress
from millionway.data.source import Labels
from millionway.model.encoder import Encoder

HELD_OUT = 0.2  # share of each class that are queries, where the data has no test split
BATCH_SIZE = 256


@dataclass(frozen=True)
class Labeled:
    """Some images of a data set, with what people called them."""

    dataset: Dataset
    instance_ids: Tensor
    labels: Tensor

    def labels_of(self, ids: Tensor) -> Tensor:
        """[ids]; each is one of the images."""
        return self._label_of[ids]

    @cached_property
    def _label_of(self) -> Tensor:
        label_of = torch.full((int(self.instance_ids.max()) + 1,), -1)
        label_of[self.instance_ids] = self.labels
        return label_of


@dataclass(frozen=True)
class Split:
    """Two disjoint labeled parts: the queries are compared with the bank."""

    bank: Labeled
    queries: Labeled
    label_names: list[str]

    @property
    def chance(self) -> float:
        """Accuracy of always answering with the commonest label of the queries."""
        return float(torch.bincount(self.queries.labels).max() / len(self.queries.labels))


def no_labels(what: str, data: str) -> ValueError:
    """For a user who wants accuracy of data without labels."""
    return ValueError(
        f"{what}: {data} has no labels, and accuracy needs them. They are the names of the folders directly below it "
        "(at least two), a `label` column of a .csv list, or those of a named set."
    )


def labeled_split(train: Dataset, test: Dataset | None, seed: int, max_images: int | None = None) -> Split | None:
    """Bank and queries; None if one is empty. Without a test split the queries are a seeded fifth of each class."""
    if train.labels is None or (test is not None and test.labels is None):
        return None
    names = train.labels.names
    if test is not None:
        assert test.labels is not None
        unknown = sorted(set(test.labels.names) - set(names))
        if unknown:
            raise ValueError(
                f"{len(unknown)} classes of the test images have no training image ({', '.join(unknown[:5])})"
            )
        bank, queries = _labeled_ids(train), _labeled_ids(test)
    else:
        bank, queries = _cut(_labeled_ids(train), train.labels, seed)
    if not len(bank) or not len(queries):
        return None
    bank, queries = _subset(bank, max_images, seed), _subset(queries, max_images, seed)
    return Split(_labeled(train, bank, names), _labeled(test or train, queries, names), names)


def _labeled_ids(dataset: Dataset) -> np.ndarray:
    assert dataset.labels is not None
    return np.flatnonzero(dataset.manifest.readable & (dataset.labels.ids >= 0))


def _cut(ids: np.ndarray, labels: Labels, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(bank, queries): by the source's own test split, else a fifth of each class, drawn by the seed."""
    if labels.is_test is not None:
        is_query = labels.is_test[ids]
    else:
        key = randomness.key_of(seed, "held-out")
        is_query = draw_of_each(
            torch.from_numpy(labels.ids[ids]), torch.from_numpy(ids), key, lambda label, num: round(HELD_OUT * num)
        ).numpy()
    return ids[~is_query], ids[is_query]


def draw_of_each(labels: Tensor, ids: Tensor, key: int, how_many: Callable[[int, int], int]) -> Tensor:
    """[images] bool: of each class how_many(label, its images), drawn by (key, id). More adds to fewer."""
    lottery = randomness.uniform(key, ids, 1)[:, 0]
    drawn = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        members = (labels == label).nonzero()[:, 0]
        drawn[members[lottery[members].argsort(stable=True)[: how_many(label, len(members))]]] = True
    return drawn


def _subset(ids: np.ndarray, max_images: int | None, seed: int) -> np.ndarray:
    if max_images is None or len(ids) <= max_images:
        return ids
    order = torch.randperm(len(ids), generator=randomness.generator(seed, "subset")).numpy()
    return np.sort(ids[order[:max_images]])


def _labeled(dataset: Dataset, ids: np.ndarray, names: list[str]) -> Labeled:
    """With places in `names` as labels."""
    assert dataset.labels is not None
    place_of = {name: place for place, name in enumerate(names)}
    places = np.array([place_of[name] for name in dataset.labels.names])
    return Labeled(dataset, torch.from_numpy(ids), torch.from_numpy(places[dataset.labels.ids[ids]]))


@contextmanager
def _evaluating(encoder: nn.Module) -> Iterator[None]:
    """Eval mode; afterwards each layer is in the mode it had, since some may rest while others learn."""
    modes = {layer: layer.training for layer in encoder.modules()}
    encoder.eval()
    try:
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode


@torch.no_grad()
def extract(
    encoder: nn.Module,
    dataset: Dataset,
    instance_ids: Tensor,
    image_size: int,
    device: torch.device,
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """(features [images, features], instance ids) of the plain views, on the CPU, encoder in eval mode.

    In the order of the ids; an image that can no longer be read is left out of both.
    """
    batches = plain_batches(dataset.store, instance_ids, image_size, BATCH_SIZE, device)
    if progress:
        batches = progress(batches, -(-len(instance_ids) // BATCH_SIZE), "encoding")
    with _evaluating(encoder):
        parts = [(encoder(images).float().cpu(), ids.cpu()) for images, ids in batches]
    return torch.cat([features for features, _ in parts]), torch.cat([ids for _, ids in parts])


class Features(NamedTuple):
    """[images, features] and [images], on the device that computes with them."""

    bank: Tensor
    bank_labels: Tensor
    queries: Tensor
    query_labels: Tensor


Extract = Callable[[nn.Module, Dataset, Tensor, int, torch.device], tuple[Tensor, Tensor]]


def extract_split(
    encoder: nn.Module, split: Split, image_size: int, device: torch.device, extract: Extract = extract
) -> Features:
    """extract: another way to the features of some images than to compute them."""
    parts = []
    for part in (split.bank, split.queries):
        features, ids = extract(encoder, part.dataset, part.instance_ids, image_size, device)
        parts += [features.to(device), part.labels_of(ids).to(device)]
    return Features(*parts)


@torch.no_grad()
def encode_views(
    encoder: Encoder,
    dataset: Dataset,
    instance_ids: Tensor,
    keys: list[int],
    device: torch.device,
    augmentation: dict[str, float],
    size: int | None = None,
) -> tuple[list[Tensor], Tensor]:
    """(features of random views, one tensor for each key, instance ids), on the CPU, encoder in eval mode.

    size: side of the views, by default the encoder's. Another image takes the place of one that cannot be read, with
    its own id.
    """
    batches = [(keys, ids) for ids in instance_ids.split(BATCH_SIZE)]
    views = view_batches(dataset.store, batches, size or encoder.spec.image_size, device, **augmentation)
    with _evaluating(encoder):
        parts = [(encoder(images).float().cpu().chunk(len(keys)), read_ids.cpu()) for images, read_ids in views]
    return [torch.cat(each) for each in zip(*(features for features, _ in parts))], torch.cat([i for _, i in parts])

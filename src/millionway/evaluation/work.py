"""What a protocol is given: an encoder, images, their labels and features, and what was asked for."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millionway.console import track
from millionway.data.dataset import Dataset, open_dataset, open_test
from millionway.evaluation.boxes import BoxedSet, boxes_fingerprint, read_boxes
from millionway.evaluation.feature_cache import FeatureCache
from millionway.evaluation.features import Features, Split, extract, extract_split, labeled_split, no_labels
from millionway.evaluation.subject import Subject
from millionway.settings.evaluate import Evaluate
from millionway.settings.stored import run_settings

MAX_UNREADABLE = 0.01


@dataclass(frozen=True)
class Images:
    """The images of an evaluation, opened when a protocol needs them."""

    asked: Evaluate
    data: str
    test_data: str | None
    num_threads: int
    data_root: Path | None
    max_unreadable: float
    manifest: Path | None = None
    """of the run, if they are its own images"""
    max_images: int | None = None

    @staticmethod
    def of(asked: Evaluate, num_threads: int) -> "Images":
        """Those that were asked for, or the run's own."""
        limit = MAX_UNREADABLE if asked.max_unreadable is None else asked.max_unreadable
        if asked.data is not None:
            return Images(asked, asked.data, asked.test_data, num_threads, asked.data_root, limit)
        if asked.run is None:
            raise ValueError("--data is missing: labeled images")
        config = run_settings(asked.run)
        own = config.images
        return Images(
            asked,
            config.data,
            asked.test_data or own.test_data,
            num_threads,
            asked.data_root or own.data_root,
            own.max_unreadable if asked.max_unreadable is None else limit,
            asked.run / "manifest.arrow",
            own.max_images,
        )

    @property
    def _how(self) -> dict[str, Any]:
        return {"num_threads": self.num_threads, "max_unreadable": self.max_unreadable, "progress": track}

    @cached_property
    def train(self) -> Dataset:
        return open_dataset(self.data, self.data_root, self.manifest, max_images=self.max_images, **self._how)

    @cached_property
    def test(self) -> Dataset | None:
        """None if it is a part of the others that is held out."""
        return open_test(self.data, self.test_data, self.data_root, **self._how)

    @cached_property
    def boxes(self) -> tuple[BoxedSet, BoxedSet]:
        """(train, test) with their boxes. Test images: test_data, or another split of the data."""
        if self.test_data is None and Path(self.data).suffix == ".json":
            raise ValueError("detect: give the .json of the test images with --test-data")
        drop = self.asked.bad_boxes == "drop"
        train = read_boxes(Path(self.data), self.asked.train_split, drop_bad=drop)
        return train, read_boxes(Path(self.test_data or self.data), self.asked.test_split, train.names, drop)

    def split(self, protocol: str, seed: int) -> Split:
        """Bank and queries, with labels that the bank has."""
        train, test = self.train, self.test
        split = labeled_split(train, test, seed)
        if split is None and train.labels is not None and (test is None or test.labels is not None):
            raise ValueError(
                f"evaluate {protocol}: {self.data}: a fifth of each class is held out, which needs three images of a "
                "class at least; or give other query images with --test-data"
            )
        if split is None:
            raise no_labels(f"evaluate {protocol}", self.data)
        missing = sorted(set(split.queries.labels.tolist()) - set(split.bank.labels.tolist()))
        if missing:
            names = ", ".join(split.label_names[label] for label in missing[:5])
            raise ValueError(f"evaluate {protocol}: {len(missing)} classes have no training image ({names})")
        return split

    def description(self, with_boxes: bool) -> dict[str, Any]:
        """For the files of results."""
        about: dict[str, Any] = {"data": self.data, "test_data": self.test_data}
        if with_boxes:
            return {**about, "data_fingerprint": boxes_fingerprint(*self.boxes)}
        about |= {"data_fingerprint": self.train.manifest.fingerprint, "num_images": len(self.train.instance_ids)}
        return about if self.test is None else {**about, "test_fingerprint": self.test.manifest.fingerprint}


@dataclass
class Work:
    """One protocol with one seed."""

    protocol: str
    asked: Evaluate
    images: Images
    subject: Subject
    seed: int
    device: torch.device
    out: Path | None = None
    """folder for what a protocol writes besides its numbers"""
    cache: FeatureCache | None = None
    used: dict[str, Any] = field(default_factory=dict)
    """settings as they were used; the protocol fills them in"""
    words: dict[str, str] = field(default_factory=dict)
    """results that are no numbers"""

    def __post_init__(self) -> None:
        self.subject.encoder.to(self.device)

    @cached_property
    def split(self) -> Split:
        split = self.images.split(self.protocol, self.seed)
        sizes = {"num_bank": len(split.bank.labels), "num_queries": len(split.queries.labels)}
        self.used |= {"chance": split.chance, **sizes, "num_labels": len(split.label_names)}
        return split

    @property
    def num_labels(self) -> int:
        return len(self.split.label_names)

    @cached_property
    def features(self) -> Features:
        size = self.subject.encoder.spec.image_size
        return extract_split(self.subject.encoder, self.split, size, self.device, self._extract)

    def _extract(
        self, encoder: torch.nn.Module, dataset: Dataset, ids: Tensor, size: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """`extract`, or what it gave the last time."""

        def compute(ids: Tensor) -> tuple[Tensor, Tensor]:
            return extract(encoder, dataset, ids, size, device, track)

        if self.cache is None:
            return compute(ids)
        return self.cache.get(self.subject.encoder_hash, dataset.manifest.fingerprint, size, ids, compute)

"""What a protocol is given: an encoder, labeled images, their features, and options."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from millionway.data.readers import Progress
from millionway.evaluation.feature_cache import FeatureCache
from millionway.evaluation.features import Labeled, Split, extract
from millionway.evaluation.subject import Subject


@dataclass(frozen=True)
class Options:
    """What a user may change; None is the protocol's own default."""

    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    weight_decay: float | None = None
    sweep: bool = False
    augment: bool = False
    shares: tuple[float, ...] = (0.01, 0.1)
    per_class: int | None = None
    crop_min: float = 0.08
    flip: float = 0.5
    detector: str = "c4"
    detect_size: int = 800
    iterations: int = 24_000
    train_split: str = "trainval"
    test_split: str = "test"
    bad_boxes: str = "error"

    @property
    def crops(self) -> dict[str, float]:
        """How a view for training with labels is made: random resized crop and flip."""
        return {"crop_min": self.crop_min, "flip": self.flip, "jitter": 0.0, "grayscale": 0.0, "blur": 0.0}

    def check(self) -> None:
        for name in ("epochs", "batch_size", "lr", "per_class", "detect_size", "iterations"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be positive, not {value}")
        if self.weight_decay is not None and not self.weight_decay >= 0:
            raise ValueError(f"--weight-decay must be at least 0, not {self.weight_decay}")
        if any(not 0 < share <= 1 for share in self.shares):
            raise ValueError(f"--shares are above 0 and at most 1, not {' '.join(map(str, self.shares))}")
        if not 0 < self.crop_min <= 1:
            raise ValueError(f"--crop-min is a share of the image above 0 and up to 1, not {self.crop_min}")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"--flip is a share from 0 to 1, not {self.flip}")
        for name, known in (("detector", ("c4", "fpn")), ("bad_boxes", ("error", "drop"))):
            if getattr(self, name) not in known:
                raise ValueError(f"--{name.replace('_', '-')} is {' or '.join(known)}, not {getattr(self, name)}")


class Features(NamedTuple):
    """[images, features] and [images], on the CPU."""

    bank: Tensor
    bank_labels: Tensor
    queries: Tensor
    query_labels: Tensor


@dataclass
class Work:
    subject: Subject
    split: Split
    seed: int
    device: torch.device
    options: Options = field(default_factory=Options)
    progress: Progress | None = None
    cache: FeatureCache | None = None
    used: dict[str, Any] = field(default_factory=dict)
    """settings as they were used; the protocol fills them in"""

    def __post_init__(self) -> None:
        self.subject.encoder.to(self.device)

    @property
    def num_labels(self) -> int:
        return len(self.split.label_names)

    @cached_property
    def features(self) -> Features:
        bank, bank_labels = self._extract(self.split.bank)
        queries, query_labels = self._extract(self.split.queries)
        return Features(bank, bank_labels, queries, query_labels)

    def _extract(self, part: Labeled) -> tuple[Tensor, Tensor]:
        encoder, size = self.subject.encoder, self.subject.encoder.spec.image_size

        def compute(ids: Tensor) -> tuple[Tensor, Tensor]:
            return extract(encoder, part.dataset, ids, size, self.device, self.progress)

        if self.cache is None:
            features, ids = compute(part.instance_ids)
        else:
            fingerprint = part.dataset.manifest.fingerprint
            features, ids = self.cache.get(self.subject.encoder_hash, fingerprint, size, part.instance_ids, compute)
        return features, part.labels_of(ids)

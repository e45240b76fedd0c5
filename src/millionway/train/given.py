"""With --init-from: what leaves the run is the mean of the given weights and of those that were learned.

Training moves the encoder far enough that it forgets things its new images do not ask for. On the way back to where it
began there are encoders that have most of what was learned and little of what was lost. Training itself never sees the
mean, so its bits do not depend on it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from millionway.files import BadFile
from millionway.model.encoder import Encoder
from millionway.model.encoder_file import START, read_encoder_file, save_encoder


@dataclass(frozen=True)
class Given:
    tensors: dict[str, Tensor]
    """of the encoder as it began"""
    share: float
    """of these in the mean"""

    @classmethod
    def of(cls, encoder: Encoder, share: float) -> "Given":
        return cls({name: each.clone() for name, each in _floating(encoder).items()}, share)

    @classmethod
    def read(cls, run: Path, encoder: Encoder, share: float) -> "Given":
        """What `keep` wrote when the run began."""
        found, own = read_encoder_file(run / START)[1], _floating(encoder)
        for name, each in own.items():
            if name not in found or found[name].shape != each.shape or found[name].dtype != each.dtype:
                raise BadFile(run / START, f"{name} is not as this run's encoder has it")
        return cls({name: found[name].to(each.device) for name, each in own.items()}, share)

    @contextmanager
    def mean_with(self, encoder: Encoder) -> Iterator[None]:
        """Meanwhile the encoder is the mean; after that it is, to the bit, what it was."""
        own = {name: each.clone() for name, each in _floating(encoder).items()}
        try:
            _write(encoder, {name: torch.lerp(each, self.tensors[name], self.share) for name, each in own.items()})
            yield
        finally:
            _write(encoder, own)


def keep(encoder: Encoder, run: Path) -> None:
    """For a run that is gone on with."""
    save_encoder(encoder, run / START)


def _floating(encoder: Encoder) -> dict[str, Tensor]:
    return {name: each for name, each in encoder.backbone.state_dict().items() if each.is_floating_point()}


@torch.no_grad()
def _write(encoder: Encoder, tensors: dict[str, Tensor]) -> None:
    for name, each in _floating(encoder).items():
        each.copy_(tensors[name])

"""Encoder and head together."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from millionway.model.encoder import Encoder
from millionway.settings.pretrain import EncoderPrecision


class Network(nn.Module):
    """Views -> features -> embeddings."""

    encoder: Encoder
    head: nn.Module

    def __init__(self, encoder: Encoder, head: nn.Module, precision: EncoderPrecision = "float32") -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.precision = precision
        self.encoder_rests = False
        self.fixed_bn: tuple[nn.Module, ...] = ()

    def rest_encoder(self, rests: bool) -> None:
        """While it rests no bit of it changes, statistics of BN included, and dropout is off; the head still learns."""
        self.encoder_rests = rests
        self.encoder.requires_grad_(not rests)
        self.train(self.training)

    def fix_bn_of_encoder(self) -> None:
        """Its BN normalizes with the statistics it has, in training too, and they never move."""
        self.fixed_bn = tuple(layer for layer in self.encoder.modules() if isinstance(layer, _BatchNorm))
        self.train(self.training)

    @property
    def learning(self) -> nn.Module:
        """What changes by a step."""
        return self.head if self.encoder_rests else self

    def train(self, mode: bool = True) -> "Network":
        super().train(mode)
        if self.encoder_rests:
            self.encoder.eval()
        for layer in self.fixed_bn:
            layer.eval()
        return self

    def forward(self, views: Float[Tensor, "views 3 size size"]) -> Float[Tensor, "views dim"]:
        """In bfloat16 statistics of BN and the sums inside of products stay float32."""
        with torch.autocast(views.device.type, dtype=torch.bfloat16, enabled=self.precision == "bfloat16"):
            embeddings = self.head(self.encoder(views))
        return embeddings.float()


@contextmanager
def buffers_kept(network: nn.Module) -> Iterator[None]:
    """Within it BN statistics may move; afterwards they are as they were."""
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    yield
    for name, buffer in network.named_buffers():
        buffer.copy_(before[name])

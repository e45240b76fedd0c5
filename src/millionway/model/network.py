"""Encoder and head together."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from millionway.model.encoder import Encoder


class Network(nn.Module):
    """Views -> features -> embeddings."""

    encoder: Encoder
    head: nn.Module

    def __init__(self, encoder: Encoder, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, views: Float[Tensor, "views 3 size size"]) -> Float[Tensor, "views dim"]:
        """bfloat16 on CUDA; BN and the sums inside stay in float32 there. float32 elsewhere."""
        with torch.autocast(views.device.type, dtype=torch.bfloat16, enabled=views.device.type == "cuda"):
            embeddings = self.head(self.encoder(views))
        return embeddings.float()

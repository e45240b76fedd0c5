"""Features -> embeddings. Thrown away after training."""

import torch
from torch import nn

from millionway import randomness


def build_head(kind: str, feature_dim: int, dim: int, seed: int = 0) -> nn.Module:
    """mlp: Linear-BN-ReLU-Linear with the feature's width inside; linear: one Linear; none: the feature itself."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.key_of(seed, "head"))
        if kind == "none":
            return nn.Identity()
        if kind == "linear":
            return nn.Linear(feature_dim, dim)
        assert kind == "mlp"
        # The bias before BN would be subtracted by it.
        return nn.Sequential(
            nn.Linear(feature_dim, feature_dim, bias=False),
            nn.BatchNorm1d(feature_dim),
            nn.ReLU(inplace=True),
            nn.Linear(feature_dim, dim),
        )

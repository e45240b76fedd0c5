"""Everything that a run changes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from millionway.model.classifier import InstanceClassifier
from millionway.model.network import Network
from millionway.model.prior import PriorProgress


@dataclass
class State:
    """Everything that a run changes."""

    network: Network
    optimizer: torch.optim.Optimizer
    classifier: InstanceClassifier
    hardest: Tensor | None
    step: int
    """steps done"""
    prior: PriorProgress | None = None
    """while the rows are being written, before the first step"""

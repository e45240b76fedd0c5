"""Everything that a run changes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from millionway.model.classifier import InstanceClassifier
from millionway.model.network import Network
from millionway.model.prior import PriorProgress
from millionway.parallel.collectives import any_rank

NUMBERS_AT_ONCE = 1 << 22


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

    def model_tensors(self) -> dict[str, Tensor]:
        """Of the network and its optimizer, by name."""
        tensors = {f"network.{name}": tensor for name, tensor in self.network.state_dict().items()}
        for name, parameter in self.network.named_parameters():
            if "momentum_buffer" in self.optimizer.state.get(parameter, {}):
                tensors[f"momentum.{name}"] = self.optimizer.state[parameter]["momentum_buffer"]
        return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}

    def classifier_tensors(self) -> dict[str, Tensor]:
        """This rank's rows, and what is kept for each."""
        tensors = {"rows": self.classifier.weight, "momentum": self.classifier.momentum}
        return tensors if self.hardest is None else {**tensors, "hardest": self.hardest}

    def all_finite(self) -> bool:
        """Whether it is worth saving, on all ranks."""
        tensors = [*self.model_tensors().values(), *self.classifier_tensors().values()]
        # Some numbers at a time: what isfinite needs beside them is as large.
        parts = (part for tensor in tensors for part in tensor.reshape(-1).split(NUMBERS_AT_ONCE))
        return not any_rank(self.classifier.group, not all(bool(torch.isfinite(part).all()) for part in parts))

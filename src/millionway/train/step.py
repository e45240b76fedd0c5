"""One step: the method on one screen."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from millionway.model.classifier import InstanceClassifier
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


@dataclass(frozen=True)
class StepResult:
    loss: Tensor
    ranks: Tensor | None
    """of this step's views among the rows as they were before the update, if asked for"""


def train_step(
    network: nn.Module,
    classifier: InstanceClassifier,
    optimizer: torch.optim.Optimizer,
    views: Float[Tensor, "views 3 size size"],
    instance_ids: Int[Tensor, " views"],
    hardest: Int[Tensor, "classes k"] | None,
    *,
    alpha: float,
    lr: float,
    row_lr: float,
    momentum: float,
    weight_decay: float,
    with_ranks: bool = False,
) -> StepResult:
    """Tell every view's instance from all others; move encoder, head and rows by SGD.

    The views of an image are rows of the batch with the same class. `hardest` and `alpha` smooth the labels.
    """
    embeddings = network(views)
    loss = classifier(embeddings, instance_ids, hardest, alpha)
    ranks = classifier.ranks(embeddings, instance_ids) if with_ranks else None

    for parameters in optimizer.param_groups:
        parameters["lr"] = lr
    optimizer.zero_grad(set_to_none=True)
    # The loss is the mean over all ranks' views; averaging gradients over ranks would divide by their number again.
    (classifier.group.size * loss).backward()
    optimizer.step()
    classifier.update(row_lr, momentum, weight_decay)
    return StepResult(loss.detach(), ranks)

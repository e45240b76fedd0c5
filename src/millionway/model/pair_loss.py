"""A second loss beside the classifier's: views of an image find each other among the views of the batch (SimCLR's).

The rows remember every image, but as it was when it was last seen. The other views of a batch are few, and of now; and
the gradient reaches both sides of a pair.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from millionway.parallel import collectives
from millionway.parallel.group import Group


def pair_loss(
    embeddings: Float[Tensor, "views dim"],
    instance_ids: Int[Tensor, " views"],
    temperature: float,
    group: Group | None = None,
) -> Float[Tensor, ""]:
    """Cross-entropy of finding the views with the same id among all others of all ranks, by cosine / temperature.

    Each image has at least two views. The result is this rank's share of the mean over all ranks' views: their sum is
    the loss, and the gradient on each rank is that of the sum.
    """
    group = group or Group()
    unit = F.normalize(embeddings)
    everybody: Tensor = _AllGather.apply(unit, group)  # pyright: ignore[reportAssignmentType]
    ids = collectives.all_gather(group, instance_ids)
    places = group.rank * len(unit) + torch.arange(len(unit), device=unit.device)
    is_self = places[:, None] == torch.arange(len(everybody), device=unit.device)
    logits = (unit @ everybody.T / temperature).masked_fill(is_self, -torch.inf)
    is_pair = (instance_ids[:, None] == ids) & ~is_self
    own = torch.where(is_pair, logits, 0.0).sum(dim=1) / is_pair.sum(dim=1)
    return (torch.logsumexp(logits, dim=1) - own).sum() / len(everybody)


class _AllGather(torch.autograd.Function):
    """What one rank's loss says about another rank's embeddings goes back to that rank."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return collectives.all_gather(group, own)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return collectives.reduce_scatter(ctx.group, grad_outputs[0]), None

"""Is it learning? Numbers that need no labels."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from millionway.model.classifier import InstanceClassifier


@torch.no_grad()
def health(
    classifier: InstanceClassifier,
    features: Float[Tensor, "views features"],
    embeddings: Float[Tensor, "views dim"],
    instance_ids: Int[Tensor, " views"],
) -> Iterator[tuple[str, float]]:
    """From fresh random views of some instances, network in eval mode.

    instance_top1, instance_top5: how often a view finds its own row. effective_rank: RankMe of the features; it falls
    towards 1 in a collapse. positive_cosine: a view and its own row. hardest_negative_cosine: the nearest other row.
    """
    ranks = classifier.ranks(embeddings, instance_ids)
    yield "instance_top1", float((ranks < 1).float().mean())
    yield "instance_top5", float((ranks < 5).float().mean())
    yield "effective_rank", effective_rank(features)
    cosines = F.normalize(embeddings.float()) @ F.normalize(classifier.weight.float()).T
    own = cosines.gather(1, instance_ids[:, None])
    others = cosines.masked_fill(~classifier.alive, -torch.inf).scatter(1, instance_ids[:, None], -torch.inf)
    yield "positive_cosine", float(own.mean())
    yield "hardest_negative_cosine", float(others.max(dim=1).values.mean())


def effective_rank(features: Float[Tensor, "images features"]) -> float:
    """RankMe: exp of the entropy of the normalized singular values."""
    values = torch.linalg.svdvals(features.cpu().double())
    share = values / values.sum().clamp(min=1e-12) + 1e-12
    return float(torch.exp(-(share * share.log()).sum()))

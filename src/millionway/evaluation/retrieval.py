"""Retrieval: is the nearest other image of the same class? Rate at 1, 5, 10, and mean average precision."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from millionway.evaluation.work import Work
from millionway.model.cosines import float64_device

TOP = (1, 5, 10)
BLOCK_QUERIES = 512


def score(work: Work) -> Iterator[tuple[str, float]]:
    """Among the queries: those of a test split were not trained on."""
    yield from retrieval(work.features.queries, work.features.query_labels)


def retrieval(
    features: Float[Tensor, "images features"], labels: Int[Tensor, " images"]
) -> Iterator[tuple[str, float]]:
    """Every image is a query among all others, by cosine. Images that are alone in their class are none.

    retrieval_top_n: one of the n nearest is of the same class. retrieval_map: mean over queries of average precision.
    """
    unit = F.normalize(features)
    counts = torch.bincount(labels)
    queries = (counts[labels] > 1).nonzero()[:, 0]
    if len(queries) == 0:
        raise ValueError("retrieval needs two images of a class, and every class has only one")
    hits, precision = torch.zeros(len(TOP), device=unit.device), 0.0
    exact = float64_device(unit)
    places = torch.arange(1, len(unit), dtype=torch.float64, device=exact)
    for block in queries.split(BLOCK_QUERIES):
        cosines = unit[block] @ unit.T
        cosines.scatter_(1, block[:, None], -torch.inf)  # itself comes last
        order = cosines.argsort(dim=1, descending=True, stable=True)[:, :-1]
        same = labels[order] == labels[block][:, None]  # [block, others]
        hits += torch.stack([same[:, :top].any(dim=1).float().sum() for top in TOP])
        same, others = same.to(exact), (counts[labels[block]] - 1).to(exact)
        average = (same.cumsum(dim=1).double() / places * same).sum(dim=1) / others
        precision += float(average.sum())
    for top, hit in zip(TOP, hits.tolist()):
        yield f"retrieval_top{top}", hit / len(queries)
    yield "retrieval_map", precision / len(queries)

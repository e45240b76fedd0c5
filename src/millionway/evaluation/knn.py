"""Weighted k-NN: each of the k nearest features votes for its label with weight exp(cosine / t)."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from millionway.evaluation.work import Work
from millionway.model.nearest import nearest

NEIGHBORS = (20, 200)
TEMPERATURE = 0.1


def score(work: Work) -> Iterator[tuple[str, float]]:
    num_bank = len(work.split.bank.labels)
    work.used.update(k=[min(k, num_bank) for k in NEIGHBORS], temperature=TEMPERATURE)
    yield from knn(*work.features)


def knn(
    bank: Float[Tensor, "bank features"],
    bank_labels: Int[Tensor, " bank"],
    queries: Float[Tensor, "queries features"],
    query_labels: Int[Tensor, " queries"],
) -> Iterator[tuple[str, float]]:
    """Top-1 accuracy with 20 and with 200 neighbors (all of the bank, if it is smaller)."""
    for k, answers in votes(bank, bank_labels, queries, NEIGHBORS).items():
        yield f"knn_{k}", float((answers == query_labels).float().mean())


def votes(
    bank: Tensor, bank_labels: Tensor, queries: Tensor, ks: Sequence[int], temperature: float = TEMPERATURE
) -> dict[int, Tensor]:
    """{k: the label with the largest sum of weights for each query}; ties go to the lower label."""
    cosines, places = nearest(F.normalize(queries), F.normalize(bank), min(max(ks), len(bank)))
    weights, labels = torch.exp(cosines / temperature), bank_labels[places]
    sums = weights.new_zeros(len(queries), int(bank_labels.max()) + 1)
    return {k: sums.zero_().scatter_add_(1, labels[:, :k], weights[:, :k]).argmax(dim=1) for k in ks}

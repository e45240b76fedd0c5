"""Weighted k-NN: each of the k nearest features votes for its label with weight exp(cosine / t)."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

NEIGHBORS = (20, 200)
TEMPERATURE = 0.1
BLOCK_QUERIES = 1024


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
    bank, queries = F.normalize(bank), F.normalize(queries)
    num_labels = int(bank_labels.max()) + 1
    answers: dict[int, list[Tensor]] = {k: [] for k in ks}
    space = queries.new_empty(min(BLOCK_QUERIES, len(queries)), len(bank))  # new memory each time is slower
    for block in queries.split(BLOCK_QUERIES):
        similar = torch.mm(block, bank.T, out=space[: len(block)])
        cosines, nearest = similar.topk(min(max(ks), len(bank)), dim=1)  # [block, k], nearest first
        weights, labels = torch.exp(cosines / temperature), bank_labels[nearest]
        for k, parts in answers.items():
            sums = torch.zeros(len(block), num_labels, dtype=cosines.dtype)
            sums.scatter_add_(1, labels[:, :k], weights[:, :k])
            parts.append(sums.argmax(dim=1))
    return {k: torch.cat(parts) for k, parts in answers.items()}

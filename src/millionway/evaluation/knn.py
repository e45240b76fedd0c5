"""Weighted k-NN: each of the k nearest features votes for its label with weight exp(cosine / t)."""

from collections.abc import Iterator

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
    for k in NEIGHBORS:
        answers = vote(bank, bank_labels, queries, min(k, len(bank)))
        yield f"knn_{k}", float((answers == query_labels).float().mean())


def vote(bank: Tensor, bank_labels: Tensor, queries: Tensor, k: int, temperature: float = TEMPERATURE) -> Tensor:
    """The label with the largest sum of weights for each query; ties go to the lower label."""
    bank, queries = F.normalize(bank), F.normalize(queries)
    num_labels = int(bank_labels.max()) + 1
    answers = []
    for block in queries.split(BLOCK_QUERIES):
        cosines, nearest = (block @ bank.T).topk(k, dim=1)  # [block, k]
        votes = torch.zeros(len(block), num_labels, dtype=cosines.dtype)
        votes.scatter_add_(1, bank_labels[nearest], torch.exp(cosines / temperature))
        answers.append(votes.argmax(dim=1))
    return torch.cat(answers)

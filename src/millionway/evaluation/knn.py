"""Weighted k-NN: each of the k nearest features votes for its label with weight exp(cosine / t)."""

import math
import threading
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from millionway.evaluation.work import Work
from millionway.model.threads import on_each

NEIGHBORS = (20, 200)
TEMPERATURE = 0.1
SCORES_AT_ONCE = 25_000_000  # by each worker: 100 MB
GROUP = 8


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
    bank, queries = F.normalize(bank), F.normalize(queries)
    num_labels = int(bank_labels.max()) + 1
    block_queries = max(1, min(SCORES_AT_ONCE // len(bank), math.ceil(len(queries) / torch.get_num_threads())))
    space = threading.local()  # new memory for each block is slower

    def answers(block: Tensor) -> list[Tensor]:
        if not hasattr(space, "scores"):
            space.scores = block.new_empty(block_queries, len(bank))
        scores = torch.mm(block, bank.T, out=space.scores[: len(block)])
        cosines, nearest = largest(scores, min(max(ks), len(bank)))  # [block, k], nearest first
        weights, labels = torch.exp(cosines / temperature), bank_labels[nearest]
        sums = [weights.new_zeros(len(block), num_labels).scatter_add_(1, labels[:, :k], weights[:, :k]) for k in ks]
        return [each.argmax(dim=1) for each in sums]

    parts = on_each(answers, queries.split(block_queries), bank.device)
    return {k: torch.cat(each) for k, each in zip(ks, zip(*parts))}


def largest(scores: Float[Tensor, "rows columns"], k: int) -> tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]]:
    """What topk gives, sooner: the k largest of a row are in the k groups of columns with the largest maxima."""
    num_groups = scores.shape[1] // GROUP
    if num_groups < 2 * k:
        values, columns = scores.topk(k, dim=1)
        return values, columns
    every, width = torch.arange(scores.shape[1], device=scores.device), num_groups * GROUP
    _, groups = largest(scores[:, :width].unflatten(1, (GROUP, num_groups)).amax(dim=1), k)
    columns = (groups[:, :, None] + every[:width:num_groups]).flatten(1)
    columns = torch.cat([columns, every[width:].expand(len(scores), -1)], dim=1)
    values, places = scores.gather(1, columns).topk(k, dim=1)
    return values, columns.gather(1, places)

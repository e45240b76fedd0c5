"""Exact k nearest of queries among others, by the largest products; never [queries, others] in memory."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from millionway.model import threads
from millionway.model.best import Best, product, reaching
from millionway.model.products import computed_in

QUERIES_AT_ONCE = 512
OTHERS_AT_ONCE = 2048  # with the queries 4 MiB of products, which stay in a core's cache
OTHERS_ELSEWHERE = 65_536


def nearest(
    queries: Float[Tensor, "queries dim"], others: Float[Tensor, "others dim"], k: int
) -> tuple[Float[Tensor, "queries k"], Int[Tensor, "queries k"]]:
    """(products, places of the others), the largest first; of equal ones any. k is at most the number of others."""
    plain = others.device.type != "cpu" or len(others) < 2 * OTHERS_AT_ONCE or 4 * k > OTHERS_AT_ONCE
    search = _running_top_k if plain else _by_bounds
    with computed_in("float32"):
        parts = threads.on_each(lambda part: search(part, others, k), queries.split(QUERIES_AT_ONCE), others.device)
    scores, places = (torch.cat(each) for each in zip(*parts))
    return scores, places


def _running_top_k(queries: Tensor, others: Tensor, k: int) -> tuple[Tensor, Tensor]:
    at_once = max(k, OTHERS_AT_ONCE if others.device.type == "cpu" else OTHERS_ELSEWHERE)
    scores = queries.new_empty(len(queries), 0)
    places = torch.empty(len(queries), 0, dtype=torch.int64, device=others.device)
    for first, part in zip(range(0, len(others), at_once), others.split(at_once)):
        here = torch.arange(first, first + len(part), device=others.device).expand(len(queries), -1)
        scores, places = torch.cat([scores, queries @ part.T], dim=1), torch.cat([places, here], dim=1)
        scores, best = scores.topk(min(k, scores.shape[1]), dim=1)
        places = places.gather(1, best)
    return scores, places


def _by_bounds(queries: Tensor, others: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As above, sooner. A part has each n-th of the others, so that it stands for all of them, however they are
    ordered: the first gives each query a guess at a bound that rather more than k will reach. Who guessed too high is
    searched again."""
    num_parts = len(others) // OTHERS_AT_ONCE
    best = Best(len(queries), k, queries)
    memory = queries.new_empty(len(queries) * -(-len(others) // num_parts))
    for number in range(num_parts):
        scores = product(queries, others[number::num_parts], memory)
        if number == 0:
            guess = 12 + 5 * k // (2 * num_parts)
            best.bound.copy_(scores.topk(guess, dim=1, sorted=False).values.amin(dim=1))
        row, column, found = reaching(scores, best.bound)
        best.add(row, column * num_parts + number, found)
    best.order()
    scores, places = best.scores, best.ids.long()
    missed = scores[:, -1].isneginf().nonzero()[:, 0]
    if len(missed):
        scores[missed], places[missed] = _running_top_k(queries[missed], others, k)
    return scores, places

"""Cosines between rows: in float32 as far as that can tell them apart, and exactly, in float64."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from millionway.model.rows import TINY_NORM, inverse_norms

PAIRS_AT_ONCE = 1 << 13  # in float64


@dataclass
class Frame:
    """Coordinates in which float32 tells rows apart also where all of them point nearly the same way.

    With any m, and u = m + c a unit row:  cos(u, v) - 1 = -|u - v|^2 / 2 = c_u . c_v + a_u + a_v  with  a = -|c|^2 / 2.
    If m is the mean, the terms are as small as the rows are near each other, and so are the errors of float32.
    """

    mean: Float[Tensor, " dim"]

    def lift(self, rows: Float[Tensor, "n dim"]) -> Float[Tensor, "n lifted"]:
        """(c, 1, a) for each row. A row too short to have a direction has the cosine 0 with all others."""
        rows = rows.float()
        inverse = inverse_norms(rows)
        lifted = rows.new_ones(len(rows), rows.shape[1] + 2)
        c = torch.mul(rows, inverse, out=lifted[:, :-2]).sub_(self.mean)
        torch.linalg.vector_norm(c, dim=1, out=lifted[:, -1]).square_().mul_(-0.5)
        lifted[:, -1].masked_fill_(inverse[:, 0] == 0, float(-0.5 * (1 + self.mean.square().sum())))
        return lifted

    @staticmethod
    def keys(lifted: Float[Tensor, "n lifted"]) -> Float[Tensor, "n lifted"]:
        """(c, a, 1) for each (c, 1, a): (c, 1, a) of one row times (c, a, 1) of another is their cosine minus 1."""
        keys = lifted.clone()
        keys[:, -2], keys[:, -1] = lifted[:, -1], lifted[:, -2]
        return keys


def rounding(a: Float[Tensor, "*n"], scores: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Two float32 scores (cosine minus 1) of a row, from `scores` upward, that differ by more are in the right order.

    a: of the row. The other rows of such scores are no farther from the mean than r = |c| + sqrt(-2 score); the errors
    of a product are of the order of r^2, and what rounding c itself leaves is of the order of r.
    """
    r = (-2 * a).clamp(min=0).sqrt() + (-2 * scores).clamp(min=0).sqrt()
    return 1e-6 * r.square() + 1.2e-7 * r


def exact_cosines(
    a: Float[Tensor, "n dim"],
    a_places: Int[Tensor, " pairs"],
    b: Float[Tensor, "m dim"],
    b_places: Int[Tensor, " pairs"],
) -> Float[Tensor, " pairs"]:
    """Of pairs of rows, in float64, each by the same operations, so that equal rows get equal ones."""
    device = float64_device(a)
    parts = [torch.empty(0, dtype=torch.float64, device=device)]
    for a_some, b_some in zip(a_places.split(PAIRS_AT_ONCE), b_places.split(PAIRS_AT_ONCE)):
        x, y = a[a_some].to(device, torch.float64), b[b_some].to(device, torch.float64)
        lengths = torch.linalg.vector_norm(x, dim=1), torch.linalg.vector_norm(y, dim=1)
        short = (lengths[0] < TINY_NORM) | (lengths[1] < TINY_NORM)
        parts.append(((x * y).sum(dim=1) / (lengths[0] * lengths[1])).masked_fill_(short, 0))
    return torch.cat(parts)


def float64_device(like: Tensor) -> torch.device:
    """MPS has no float64: such work is done on the CPU."""
    return torch.device("cpu") if like.device.type == "mps" else like.device


def in_order(ids: Int[Tensor, "n m"], scores: Float[Tensor, "n m"]) -> Int[Tensor, "n m"]:
    """The ids of each row by (score, lower id)."""
    ids, order = ids.sort(dim=1)
    return ids.gather(1, scores.gather(1, order).argsort(dim=1, descending=True, stable=True))


def first_of_each(
    rows: Int[Tensor, " n"], ids: Int[Tensor, " n"], scores: Float[Tensor, " n"], k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of candidates (row, id, score) the first k of each row, by (row, score, lower id)."""
    order = ids.argsort(stable=True)
    order = order[scores[order].argsort(descending=True, stable=True)]
    order = order[rows[order].argsort(stable=True)]
    num = torch.bincount(rows)
    place = torch.arange(len(rows), device=rows.device) - (num.cumsum(0) - num)[rows[order]]
    order = order[place < k]
    return rows[order], ids[order], scores[order]

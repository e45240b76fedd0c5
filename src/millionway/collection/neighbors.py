"""Exact nearest neighbors of images by the cosine of their vectors."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from millionway.data.readers import Progress
from millionway.model import hardest, threads
from millionway.model.nearest import nearest as nearest_of_queries

NUM_NEIGHBORS = 20  # of an image in collection.parquet
AT_ONCE = 1024


@dataclass
class Neighbors:
    """[images, k] each, most similar first."""

    places: Int[Tensor, "images k"]
    cosines: Float[Tensor, "images k"]

    @property
    def nearest(self) -> Float[Tensor, " images"]:
        """The cosine of each image with its nearest other one."""
        return self.cosines[:, 0]


def nearest(unit: Float[Tensor, "images dim"], k: int = NUM_NEIGHBORS, progress: Progress | None = None) -> Neighbors:
    """The k most similar others of each; unit: vectors of length one. Fewer if there are not so many."""
    k = min(k, len(unit) - 1)
    if k < 1:
        return Neighbors(torch.zeros(len(unit), 0, dtype=torch.int32), unit.new_zeros(len(unit), 0))
    all_alive = torch.ones(len(unit), dtype=torch.bool, device=unit.device)
    places = hardest.top_k(unit, k, all_alive, progress=progress)

    def cosines(some: tuple[Tensor, Tensor]) -> Tensor:
        images, near = some
        return torch.einsum("nd,nkd->nk", images, unit[near.long()])

    parts = threads.on_each(cosines, zip(unit.split(AT_ONCE), places.split(AT_ONCE)), unit.device)
    return Neighbors(places, torch.cat(parts).clamp_(-1, 1))


def most_similar(queries: Float[Tensor, "queries dim"], unit: Float[Tensor, "images dim"], k: int) -> Neighbors:
    """The k images that are most similar to each query; of equal ones any."""
    cosines, places = nearest_of_queries(queries, unit, min(k, len(unit)))
    return Neighbors(places.to(torch.int32), cosines.clamp(-1, 1))

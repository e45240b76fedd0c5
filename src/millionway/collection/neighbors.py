"""Exact nearest neighbors by cosine, block by block: never [images, images] in memory.

1. A lower bound of each image's k-th best cosine: that of a sample of the images.
2. All products, a block of images against a block of images. A block serves both, so half of them are enough. What
   passes the bound of an image is kept for it.
3. When a block of images has gathered enough, the k best stay, and the k-th of them is the new bound.

Beyond the vectors it takes the answer itself, and a few blocks for each thread.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from millionway.data.readers import Progress
from millionway.model import threads
from millionway.model.hardest import stable_order

NUM_NEIGHBORS = 20  # of an image in collection.parquet
BLOCK = 1024
SAMPLE = 4096
ROUNDING = 2e-6  # by which the same cosine may differ between two products
GATHERED = 64  # kept for an image, on average, before the best are chosen


class Neighbors:
    """[images, k] each, most similar first."""

    def __init__(self, places: Int[Tensor, "images k"], cosines: Float[Tensor, "images k"]) -> None:
        self.places = places
        self.cosines = cosines

    @property
    def nearest(self) -> Float[Tensor, " images"]:
        """The cosine of each image with its nearest other one."""
        return self.cosines[:, 0]


@dataclass
class _Block:
    """Some images, and what may be near to them."""

    unit: Tensor  # [block, dim]
    first: int
    bound: Tensor  # [block]
    places: Tensor  # [block, k] int32, a view of the answer
    cosines: Tensor
    waiting: list[tuple[Tensor, Tensor, Tensor]]
    num_waiting: int = 0

    def add(self, image: Tensor, place: Tensor, cosine: Tensor) -> None:
        self.waiting.append((image.to(torch.int16), place.to(torch.int32), cosine))
        self.num_waiting += len(image)
        if self.num_waiting > GATHERED * len(self.unit):
            self.choose()

    def choose(self) -> None:
        """The k best of those that wait and of those chosen before."""
        if not self.waiting:
            return
        k, size = self.places.shape[1], len(self.unit)
        image, place, cosine = (torch.cat(part) for part in zip(*self.waiting))
        self.waiting, self.num_waiting = [], 0
        order = stable_order(image)
        image = image[order].long()
        num = torch.bincount(image, minlength=size)
        slot = torch.arange(len(image), device=image.device) - (num.cumsum(0) - num)[image] + k
        width = k + int(num.max())
        places, cosines = self.places.new_zeros(size, width), self.cosines.new_full((size, width), -torch.inf)
        places[:, :k], cosines[:, :k] = self.places, self.cosines
        places[image, slot], cosines[image, slot] = place[order], cosine[order]
        best = cosines.sort(dim=1, descending=True, stable=True)
        self.cosines[:] = best.values[:, :k]
        self.places[:] = places.gather(1, best.indices[:, :k])
        # One that is only as near as the k-th comes too late.
        kth = self.cosines[:, -1].clone()
        self.bound = torch.maximum(self.bound, torch.nextafter(kth, torch.full_like(kth, torch.inf)))


def nearest(unit: Float[Tensor, "images dim"], k: int = NUM_NEIGHBORS, progress: Progress | None = None) -> Neighbors:
    """The k most similar others of each, by the cosine; unit: vectors of length one. Fewer if there are not so many."""
    num = len(unit)
    k = min(k, num - 1)
    places = torch.zeros(num, max(k, 0), dtype=torch.int32, device=unit.device)
    cosines = torch.full((num, max(k, 0)), -torch.inf, device=unit.device)
    if k < 1:
        return Neighbors(places, cosines)
    sample = unit[:: -(-num // SAMPLE)]
    parts = [part.split(BLOCK) for part in (unit, places, cosines)]
    bounds = threads.on_each(lambda part: _bound(part, sample, k), parts[0], unit.device)
    blocks = [
        _Block(part, number * BLOCK, bound, own_places, own_cosines, [])
        for number, (part, bound, own_places, own_cosines) in enumerate(zip(parts[0], bounds, parts[1], parts[2]))
    ]
    numbers = range(len(blocks))
    for number in progress(numbers, len(blocks), "neighbors") if progress else numbers:
        one = blocks[number]
        for found in threads.on_each(lambda other, one=one: _compare(one, other), blocks[number:], unit.device):
            one.add(*found)
        one.choose()
    return Neighbors(places, cosines.clamp_(-1, 1))


def _bound(unit: Tensor, sample: Tensor, k: int) -> Tensor:
    """At least k others reach it; one of the sample may be the image itself."""
    if len(sample) < k + 1:
        return unit.new_full((len(unit),), -2.0)
    return (unit @ sample.T).topk(k + 1, dim=1).values[:, -1] - ROUNDING


def _compare(one: _Block, other: _Block) -> tuple[Tensor, Tensor, Tensor]:
    """Gives the other what is near to it, and returns what is near to the one. Only this thread has the other."""
    cosines = one.unit @ other.unit.T
    if one is other:
        cosines.fill_diagonal_(-torch.inf)
    width = cosines.shape[1]
    near = flat_places((cosines >= one.bound[:, None]).view(-1))
    image, column = near // width, near % width
    found = image, column + other.first, cosines.view(-1)[near]
    if one is not other:
        near = flat_places((cosines >= other.bound).view(-1))
        image, column = near // width, near % width
        other.add(column, image + one.first, cosines.view(-1)[near])
    return found


def flat_places(found: Tensor) -> Tensor:
    """Ascending places of True. On a CPU numpy is several times as fast."""
    if found.device.type != "cpu":
        return found.nonzero()[:, 0]
    return torch.from_numpy(np.flatnonzero(found.numpy()))


def most_similar(queries: Float[Tensor, "queries dim"], unit: Float[Tensor, "images dim"], k: int) -> Neighbors:
    """The k images that are most similar to each query, exactly; of equal ones any."""
    k = min(k, len(unit))
    found = threads.on_each(lambda part: _best_of(part, unit, k), queries.split(BLOCK), unit.device)
    return Neighbors(*(torch.cat(part) for part in zip(*found)))


def _best_of(queries: Tensor, unit: Tensor, k: int) -> tuple[Tensor, Tensor]:
    cosines = queries.new_empty(len(queries), 0)
    places = torch.empty(len(queries), 0, dtype=torch.int64, device=unit.device)
    for first, part in zip(range(0, len(unit), SAMPLE), unit.split(SAMPLE)):
        some = (queries @ part.T).topk(min(k, len(part)), dim=1)
        cosines, places = torch.cat([cosines, some.values], dim=1), torch.cat([places, some.indices + first], dim=1)
        best = cosines.topk(min(k, cosines.shape[1]), dim=1)
        cosines, places = best.values, places.gather(1, best.indices)
    return places.to(torch.int32), cosines.clamp(-1, 1)

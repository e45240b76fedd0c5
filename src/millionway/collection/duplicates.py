"""What is there more than once: the same bytes, or nearly the same picture.

1. Copies: images whose files have the same content.
2. Candidates: pairs of neighbors whose cosine reaches a threshold. It comes from the data: what the nearest cosines of
   most images reach, since pixels decide in the end.
3. Verified on pixels at small scale, so that two photos of one object are not called copies. Where all images are
   nearly alike, such as digits of a few pixels, a copy must be more alike than those are.

Pairs make groups: an image and all that are alike to it, so that a chain of small differences is not one group. Of each
group one image is kept. Nothing is ever deleted.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from millionway import randomness
from millionway.collection.looks import Looks
from millionway.collection.neighbors import Neighbors
from millionway.collection.pairs import verify
from millionway.data.manifest import Manifest
from millionway.data.readers import Progress
from millionway.settings.collection import Keep

LIKENESS = 0.97  # of the pixels of a copy
MOST_ASKED = 0.995  # however much alike all images are
ALIKE = 0.99  # quantile of the likeness of images that are no copies
NEARER = 4  # times: how much less a copy differs than those
SAMPLE, FEWEST = 1000, 100  # images that say how alike those are
QUANTILE = 0.25  # of the nearest cosines, where no threshold is given


@dataclass(frozen=True)
class Pairs:
    places: Int[Tensor, "pairs 2"]
    cosine: Float[Tensor, " pairs"]
    likeness: Float[Tensor, " pairs"]
    """of the pixels, 1 for the same bytes"""

    def where(self, good: Tensor) -> "Pairs":
        return Pairs(self.places[good], self.cosine[good], self.likeness[good])


def default_threshold(near: Neighbors) -> float:
    """Three quarters of the images have a neighbor at least as near."""
    return float(np.quantile(near.nearest.cpu().numpy(), QUANTILE)) if near.cosines.numel() else 1.0


def check_threshold(threshold: float | None) -> None:
    if threshold is not None and not 0 <= threshold <= 1:
        raise ValueError(f"--threshold is a cosine from 0 to 1, not {threshold:g}; left out, it comes from the data")


def near_pairs(near: Neighbors, threshold: float) -> tuple[Int[Tensor, "pairs 2"], Float[Tensor, " pairs"]]:
    """Pairs of neighbors that reach the threshold, each once, and their cosines."""
    image, column = (near.cosines >= threshold).nonzero(as_tuple=True)
    other = near.places[image, column].long()
    low, high = torch.minimum(image, other), torch.maximum(image, other)
    _, first = np.unique((low * len(near.places) + high).cpu().numpy(), return_index=True)
    keep = torch.from_numpy(first)
    return torch.stack([low[keep], high[keep]], dim=1).cpu(), near.cosines[image[keep], column[keep]].cpu()


def find_pairs(
    near: Neighbors, looks: Looks, hashes: np.ndarray, threshold: float, progress: Progress | None = None
) -> Pairs:
    """All candidates with their likeness; hashes: [images] of the content."""
    candidates, cosines = near_pairs(near, threshold)
    pairs = Pairs(candidates, cosines, verify(looks, looks, candidates, progress))
    copies = same_bytes(hashes)
    ones = torch.ones(len(copies))
    one, other = pairs.places.numpy().T
    same = torch.from_numpy(hashes[one] == hashes[other])
    pairs = pairs.where(~same)
    return Pairs(torch.cat([copies, pairs.places]), torch.cat([ones, pairs.cosine]), torch.cat([ones, pairs.likeness]))


def same_bytes(hashes: np.ndarray) -> Int[Tensor, "pairs 2"]:
    """Each copy with the next one."""
    order = np.argsort(hashes, kind="stable")
    same = (hashes[order][1:] == hashes[order][:-1]) & (hashes[order][1:] != "")
    return torch.from_numpy(np.stack([order[:-1][same], order[1:][same]], axis=1).astype(np.int64))


def least_likeness(near: Neighbors, looks: Looks) -> float:
    """From which on two images are copies. Few have so many that the last of an image's neighbors is one too."""
    num = len(near.places)
    if num < FEWEST:
        return LIKENESS
    some = torch.randperm(num, generator=randomness.generator(0, "likeness"))[:SAMPLE]
    others = verify(looks, looks, torch.stack([some, near.places[some, -1].long().cpu()], dim=1))
    return min(MOST_ASKED, max(LIKENESS, 1 - (1 - float(np.quantile(others.numpy(), ALIKE))) / NEARER))


def groups(pairs: Int[Tensor, "pairs 2"], hashes: np.ndarray) -> Int[np.ndarray, " images"]:
    """[images] the number of its group, in the order of their first images; -1 for an image that is there once.

    Images with the same content are one picture. The picture with the most others alike to it makes a group with them,
    then the next of those that are left.
    """
    num = len(hashes)
    picture = connected_components(_graph(same_bytes(hashes).numpy(), num), directed=False)[1]
    graph = _graph(picture[pairs.numpy()], num)
    alike = np.diff(graph.indptr)
    group = np.full(num, -1, np.int64)  # of pictures
    for center in np.argsort(-alike, kind="stable")[: np.count_nonzero(alike)].tolist():
        if group[center] < 0:
            others = graph.indices[graph.indptr[center] : graph.indptr[center + 1]]
            free = others[group[others] < 0]
            group[free] = center
            group[center] = center
    group = np.where(group < 0, np.arange(num), group)[picture]
    several = np.flatnonzero(np.bincount(group, minlength=num)[group] > 1)
    number, found = np.full(num, -1, np.int32), {}
    for image in several.tolist():
        number[image] = found.setdefault(int(group[image]), len(found))
    return number


def _graph(edges: Int[np.ndarray, "edges 2"], num: int) -> csr_array:
    one, other = edges[edges[:, 0] != edges[:, 1]].T
    graph = coo_array((np.ones(len(one), bool), (one, other)), (num, num)).tocsr()
    return csr_array(graph + graph.T)


def kept_of(group: Int[np.ndarray, " images"], manifest: Manifest, ids: np.ndarray, keep: Keep) -> np.ndarray:
    """[images] True for those alone and for one of each group: the largest, or the oldest; then the first."""
    area = manifest.column("width").astype(np.int64) * manifest.column("height")
    num_bytes, modified = manifest.column("num_bytes"), manifest.column("modified")
    oldest = np.where(modified > 0, modified, np.iinfo(np.int64).max)
    keys = (ids, -num_bytes[ids], -area[ids]) if keep == "largest" else (ids, oldest[ids])
    best_first = np.lexsort(keys)
    kept = group < 0
    _, firsts = np.unique(group[best_first], return_index=True)
    kept[best_first[firsts]] = True
    return kept


def best_pair(pairs: Pairs, hashes: np.ndarray, num_images: int) -> list[tuple[float, float] | None]:
    """[images] (likeness, cosine) with the most similar other one; None for an image with the same bytes as another."""
    found: list[tuple[float, float] | None] = [(0.0, 0.0)] * num_images
    for (one, other), likeness, cosine in zip(
        pairs.places.tolist(), pairs.likeness.tolist(), pairs.cosine.tolist(), strict=True
    ):
        for image in (one, other):
            found[image] = max(found[image] or (0.0, 0.0), (likeness, cosine))
    for image in same_bytes(hashes).flatten().tolist():
        found[image] = None
    return found

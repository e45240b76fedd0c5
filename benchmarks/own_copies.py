"""Which images of CIFAR-10 are copies of each other in CIFAR-10 itself? They must not count as mistakes.

The rule knows nothing of the detector that is measured: no vectors, no small scale, and edges instead of pixels.
Two images are copies if the differences of neighboring pixels in the middle of the one correlate by at least LIKENESS
with those of the other, mirrored or not, moved by up to MOVED pixels. All pairs are compared whose 8 x 8 means
correlate at all. On a sheet of pairs around the limit, all above it were copies to the eye, and some below it too: they
count as mistakes.
"""

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

LIKENESS = 0.7
AT_ALL = 0.85  # correlation of the 8 x 8 means
MOVED = 3
PAIRS_AT_ONCE = 256


def own_copies(pixels: Tensor) -> np.ndarray:
    """[images] the number of its group of copies, an own one for an image that is there once. pixels: uint8 RGB."""
    images = pixels.float()
    pairs = candidates(images)
    edges, mirrored = edges_of(images), edges_of(images.flip(3))
    found = [
        torch.maximum(moved(edges[part[:, 0]], other), moved(other, edges[part[:, 0]]))
        for part in pairs.split(PAIRS_AT_ONCE)
        for other in [torch.where((part[:, 2] == 1)[:, None, None, None], mirrored[part[:, 1]], edges[part[:, 1]])]
    ]
    one, other, _ = pairs[torch.cat(found) >= LIKENESS].T.numpy()
    graph = coo_array((np.ones(len(one)), (one, other)), (len(images), len(images)))
    return connected_components(graph, directed=False)[1]


def candidates(images: Tensor) -> Tensor:
    """[pairs, 3] two images, and 1 where the second one is mirrored."""
    means = F.avg_pool2d(images, images.shape[-1] // 8)
    units = [F.normalize((each - each.mean(dim=(2, 3), keepdim=True)).flatten(1)) for each in (means, means.flip(3))]
    found = []
    for first in range(0, len(images), 1000):
        for is_mirrored, unit in enumerate(units):
            near = (units[0][first : first + 1000] @ unit.T > AT_ALL).nonzero()
            near[:, 0] += first
            near = near[near[:, 0] < near[:, 1]]
            found.append(F.pad(near, (0, 1), value=is_mirrored))
    return torch.cat(found)


def edges_of(images: Tensor) -> Tensor:
    gray = images.mean(dim=1)
    return torch.stack([gray[:, :-1, 1:] - gray[:, :-1, :-1], gray[:, 1:, :-1] - gray[:, :-1, :-1]], dim=1)


def moved(one: Tensor, other: Tensor) -> Tensor:
    """[pairs] the best correlation of the middle of the one with a part of the other."""
    side = one.shape[-1] - 2 * MOVED
    middle = F.normalize(one[:, :, MOVED:-MOVED, MOVED:-MOVED].flatten(1))
    best = torch.full((len(one),), -1.0)
    for top in range(2 * MOVED + 1):
        for left in range(2 * MOVED + 1):
            part = other[:, :, top : top + side, left : left + side].flatten(1)
            best = torch.maximum(best, (middle * F.normalize(part)).sum(dim=1))
    return best

"""What does not belong: a score for each image, and the reason in words.

By vectors: how far an image is from the nearest of the others, a share of them that is large enough that a handful of
strange images does not keep each other company; and how few images one comes to by going from neighbor to neighbor, so
that a small group apart is found, however close together its images are. By pixels and sizes: how far a number
(brightness, contrast, color, size, aspect) is from those of the rest. Each in robust standard deviations; the score is
their length.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse import csr_matrix, diags
from torch import Tensor

from millionway import randomness
from millionway.collection.neighbors import Neighbors
from millionway.model import threads

COMPANY = 0.02  # share of the images that counts as a group of its own
WITNESSES = 4096
BLOCK = 1024
STEPS = 16  # of a walk to neighbors
USUAL = 10  # the neighbor whose distance is what is near for an image
PROBES, PROBES_AT_ONCE = 256, 32
FAR = 3.5  # robust standard deviations beyond which a reason is named
UNIFORM = 0.02  # standard deviation of brightness, of 1


@dataclass(frozen=True)
class Outliers:
    score: np.ndarray  # [images] 0 to 1
    reason: list[str]
    """'' where nothing is far off"""
    mostly: list[str]
    """for an image that is asked about all the same: what is off most, '' where nothing is off at all"""


def strangeness(unit: Float[Tensor, "images dim"], seed: int = 0) -> Float[Tensor, " images"]:
    """[images] 1 minus the mean cosine with the nearest of all others, 2 % of them, estimated from a sample."""
    num = len(unit)
    if num < 2:
        return unit.new_zeros(num)
    order = torch.randperm(num, generator=randomness.generator(seed, "witnesses"))[:WITNESSES]
    witnesses = unit[order.to(unit.device)]
    k = max(1, round(COMPANY * (len(witnesses) - 1)))

    def of(part: Tensor) -> Tensor:
        # A witness meets itself; that one is left out, and for all others the same number of neighbors counts.
        best = (part @ witnesses.T).topk(min(k + 1, len(witnesses)), dim=1).values
        itself = best[:, :1] > 1 - 1e-6
        mean = torch.where(itself, best[:, 1:].mean(dim=1, keepdim=True), best[:, :k].mean(dim=1, keepdim=True))
        return 1 - mean[:, 0]

    return torch.cat(threads.on_each(of, unit.split(BLOCK), unit.device))


def reach(near: Neighbors, seed: int = 0) -> Float[np.ndarray, " images"]:
    """[images] how many images a walk from neighbor to neighbor comes to: 1 / sum of squared probabilities.

    That sum is estimated: the walk's probabilities times random signs have it as their mean square. A step to a
    neighbor is the likelier the nearer it is, in units of what is near for both of the two.
    """
    num, k = near.places.shape
    if k == 0 or bool(near.cosines.min() > 1 - 1e-6):  # none, or any could be the nearest
        return np.ones(num)
    places = near.places.cpu().numpy()
    distance = np.maximum(1 - near.cosines.cpu().numpy().astype(np.float64), 1e-9)
    scale = distance[:, min(USUAL, k) - 1]
    scale = np.maximum(scale, np.median(scale) / 4)  # copies of one picture are near to others all the same
    likely = np.exp(-2 * distance / np.sqrt(scale[:, None] * scale[places]))
    start = np.repeat(np.arange(num), k)
    steps = csr_matrix((likely.ravel(), (start, places.ravel())), (num, num))
    steps = csr_matrix(steps + steps.T)
    steps = csr_matrix(diags(1 / np.asarray(steps.sum(axis=1)).ravel()) @ steps, dtype=np.float32)
    total = np.zeros(num)
    for part in range(PROBES // PROBES_AT_ONCE):
        draw = randomness.generator(seed, "walks", part)
        signs = torch.randint(2, (num, PROBES_AT_ONCE), generator=draw).float().numpy() * 2 - 1
        for _ in range(STEPS):
            signs = steps @ signs
        total += np.square(signs).sum(axis=1)
    return PROBES / np.maximum(total, 1e-12)


def outliers(
    unit: Float[Tensor, "images dim"],
    near: Neighbors,
    pixels: dict[str, np.ndarray],
    width: np.ndarray,
    height: np.ndarray,
) -> Outliers:
    """pixels: brightness, contrast and color of each image, NaN where it could not be read."""
    away = robust(strangeness(unit).cpu().numpy().astype(np.float64), upper=True)
    apart = robust(-np.log(reach(near)), upper=True)
    area = np.log2(np.maximum(1, width.astype(np.float64) * height))
    aspect = np.log2(np.maximum(1, width) / np.maximum(1, height).astype(np.float64))
    reasons: list[tuple[np.ndarray, str, str]] = [
        (away, "far from everything", ""),
        (apart, "in a small group apart from the rest", ""),
        (robust(pixels["brightness"]), "much brighter than the rest", "much darker than the rest"),
        (robust(pixels["contrast"]), "much more contrast than the rest", "much less contrast than the rest"),
        (robust(pixels["color"]), "much more color than the rest", "much less color than the rest"),
        (robust(area), "much larger than the rest", "much smaller than the rest"),
        (robust(aspect), "much wider than the rest", "much taller than the rest"),
    ]
    uniform = pixels["contrast"] < UNIFORM
    # What the encoder says counts in full; a number of the pixels alone must be further off to count as much.
    by_encoder = [np.maximum(away, 0), np.maximum(apart, 0)]
    by_pixels = [np.abs(value) / 2 for value, _, _ in reasons[2:]]
    strength = np.sqrt(np.square(np.stack([*by_encoder, *by_pixels, uniform * 2 * FAR])).sum(axis=0))
    words, mostly = [], []
    for place in range(len(unit)):
        named = [(abs(value[place]), high if value[place] > 0 else low) for value, high, low in reasons]
        named = sorted(((far, word) for far, word in named if word), reverse=True)
        found = ["nearly uniform"] * bool(uniform[place]) + [word for far, word in named if far > FAR]
        words.append("; ".join(found))
        most, word = named[0]
        mostly.append(f"a little of several things, most of all {word.removeprefix('much ')}" if most else "")
    return Outliers((strength / (strength + FAR)).astype(np.float32), words, mostly)


def robust(values: np.ndarray, upper: bool = False) -> np.ndarray:
    """How many standard deviations from the median, by the median deviation; 0 where unknown or where all are alike.

    upper: by the deviations above it alone, for numbers with a long tail there.
    """
    known = values[np.isfinite(values)]
    if len(known) == 0:
        return np.zeros(len(values))
    middle = np.median(known)
    off = np.abs(known[known >= middle] - middle) if upper else np.abs(known - middle)
    # Where more than half are the same, the rest is measured by its mean deviation.
    spread = max(1.4826 * np.median(off), 1e-9) if np.median(off) > 1e-9 else 1.2533 * off.mean() + 1e-9
    return np.where(np.isfinite(values) & (np.abs(values - middle) > 1e-6), (values - middle) / spread, 0.0)

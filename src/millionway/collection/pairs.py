"""Are two images copies of each other? Decided on pixels at small scale, with the better of several alignments.

An image is compared with windows of the other one (a copy may be cropped) and with their mirror images, by the
correlation of their pixels: brightness and contrast do not count. Before that both are blurred, since a copy may be
(it was small once, or compressed), and lose the slow change over the picture that two skies or two seas have in common.
Two photos of one object do not correlate.
"""

import functools

import torch
from jaxtyping import Float, Int
from torch import Tensor

from millionway.collection.looks import Looks
from millionway.data.readers import Progress

SIDE = 16
WINDOWS = ((1.0, 1), (0.95, 3), (0.9, 4), (0.85, 4))  # share of a side, and at how many places along it
FLAT = 0.01  # standard deviation of a picture without content, of 1
LEAST = 1e-3  # length of what is compared
MAX_GAIN = 1.6  # a copy may be brighter by this factor
MAX_TINT = 0.15  # by which share its mean color may differ after that
PROMISING, CERTAIN = 0.3, 0.99  # of the whole images; in between, windows are tried
PAIRS_AT_ONCE = 2048


@functools.cache
def cuts(side: int) -> list[Float[Tensor, "steps small side"]]:
    """For each share: from the pixels along a side to the pixels of a window, at each place of the window."""
    found = []
    for share, steps in WINDOWS:
        offsets = torch.linspace(0, 1 - share, steps)[:, None]
        middles = (torch.arange(2 * SIDE) + 0.5) / (2 * SIDE)  # two points a pixel, so that none is passed over
        at = ((offsets + share * middles) * side - 0.5).clamp(0, side - 1)  # [steps, points]
        weights = (1 - (at[..., None] - torch.arange(side)).abs()).clamp_min(0)  # of the two pixels beside each point
        found.append(_blur() @ weights.unflatten(1, (SIDE, 2)).mean(dim=2))
    return found


def _blur() -> Float[Tensor, "small small"]:
    """A quarter, a half and a quarter of the pixels along a side; the border is repeated."""
    itself, at = torch.eye(SIDE), torch.arange(SIDE)
    return itself / 2 + (itself[(at - 1).clamp_min(0)] + itself[(at + 1).clamp_max(SIDE - 1)]) / 4


@functools.cache
def slow_change() -> Float[Tensor, "pixels 6"]:
    """Orthonormal: what a polynomial of degree two over the picture can be."""
    at = (torch.arange(SIDE) + 0.5) / SIDE * 2 - 1
    y, x = torch.meshgrid(at, at, indexing="ij")
    powers = [x**i * y**j for i in range(3) for j in range(3 - i)]
    return torch.linalg.qr(torch.stack(powers, dim=2).flatten(0, 1)).Q


def windows(images: Float[Tensor, "images side side"]) -> Float[Tensor, "images windows pixels"]:
    """Each window of each image at SIDE x SIDE pixels, the whole image first."""
    seen = [torch.einsum("hyi,nij,wxj->nhwyx", cut, images, cut).flatten(1, 2) for cut in cuts(images.shape[-1])]
    return torch.cat(seen, dim=1).flatten(2)


def likeness(
    first: Float[Tensor, "pairs 3 side side"], second: Float[Tensor, "pairs 3 side side"]
) -> Float[Tensor, " pairs"]:
    """Of each pair: 1 for a copy, however bright, mirrored or a little cropped; 0 for images with nothing in common."""
    gray = [each.mean(dim=1) for each in (first, second)]
    whole = cuts(first.shape[-1])[0][0]  # [SIDE, side]
    small = [(whole @ each @ whole.T).flatten(1) for each in gray]
    found = _correlation(small[0][:, None], small[1])
    found = found * _same_colors(first, second)
    unsure = ((found > PROMISING) & (found < CERTAIN)).nonzero()[:, 0]
    for one, other in ((0, 1), (1, 0)) if len(unsure) else ():
        better = _correlation(windows(gray[one][unsure]), small[other][unsure])
        found[unsure] = torch.maximum(found[unsure], better)
    return torch.where(_flat(small[0]) | _flat(small[1]), _same_pixels(first, second), found)


def _correlation(windows: Tensor, whole: Tensor) -> Tensor:
    """[pairs] the best correlation of a whole image, or of its mirror image, with a window of the other."""
    slow = slow_change()
    detail = whole - whole @ slow @ slow.T
    mirrored = detail.unflatten(1, (SIDE, SIDE)).flip(-1).flatten(1)
    wanted = torch.stack([detail, mirrored], dim=2)  # [pairs, pixels, 2]
    wanted = wanted / wanted.norm(dim=1, keepdim=True).clamp_min(LEAST)
    # What is wanted has no slow change, so the windows need not lose theirs but for their length.
    lengths = (windows.square().sum(dim=2) - (windows @ slow).square().sum(dim=2)).clamp_min(LEAST**2).sqrt()
    return ((windows @ wanted) / lengths[:, :, None]).flatten(1).amax(dim=1).clamp(0, 1)


def _same_colors(first: Tensor, second: Tensor) -> Tensor:
    """[pairs] 1.0 where the mean colors are the same up to brightness."""
    a, b = (each.mean(dim=(2, 3)) for each in (first, second))
    gain = (a * b).sum(dim=1) / (a * a).sum(dim=1).clamp_min(1e-6)
    off = (b - gain[:, None] * a).norm(dim=1) / b.norm(dim=1).clamp_min(1e-6)
    return ((gain < MAX_GAIN) & (gain > 1 / MAX_GAIN) & (off < MAX_TINT)).float()


def _flat(small: Tensor) -> Tensor:
    return small.std(dim=1, correction=0) < FLAT


def _same_pixels(first: Tensor, second: Tensor) -> Tensor:
    """Without content there is nothing to correlate; then the pixels must be the same."""
    return ((first - second).abs().mean(dim=(1, 2, 3)) < FLAT).float()


def verify(
    looks: Looks, others: Looks, pairs: Int[Tensor, "pairs 2"], progress: Progress | None = None
) -> Float[Tensor, " pairs"]:
    """The likeness of an image of the one with an image of the other."""
    parts = pairs.split(PAIRS_AT_ONCE) if len(pairs) else ()
    found = [torch.empty(0)]
    for part in progress(parts, len(parts), "comparing pixels") if progress and parts else parts:
        images = [_pixels(look, column) for look, column in ((looks, part[:, 0]), (others, part[:, 1]))]
        found.append(likeness(*images))
    return torch.cat(found)


def _pixels(looks: Looks, places: Tensor) -> Tensor:
    unique, inverse = places.unique(return_inverse=True)
    pixels = torch.tensor(looks.small(unique.numpy())).permute(0, 3, 1, 2).float() / 255
    return pixels[inverse]

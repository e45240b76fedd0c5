"""Random views, a batch at a time, on the device.

The augmentation is SimCLR's, as in the paper: random resized crop, flip, color jitter, grayscale, blur. Every image of
the batch has its own parameters, drawn from (seed, epoch, instance, view) alone. Images are float in [0, 1].
"""

import math
from dataclasses import dataclass, fields
from itertools import permutations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from millionway import randomness

NUM_CROP_TRIES = 10
ASPECT_RATIO = (3 / 4, 4 / 3)
JITTER_ORDERS = torch.tensor(list(permutations(range(4))))  # [24, 4] the ways to order four color operations


@dataclass(frozen=True)
class ViewParameters:
    """One random view of each of a batch of images: first axis `images`."""

    boxes: Float[Tensor, "images 4"]  # top, left, height, width in pixels of the image
    flip: Tensor  # bool
    jitter: Tensor  # bool: whether the four factors are applied
    factors: Float[Tensor, "images 4"]  # brightness, contrast, saturation, hue
    order: Int[Tensor, "images 4"]  # which of the four comes first, second, ...
    gray: Tensor  # bool
    blur: Tensor  # bool
    sigma: Float[Tensor, " images"]  # of the blur, in pixels of the view


def draw_parameters(
    key: int,
    instance_ids: Tensor,
    heights: Tensor,
    widths: Tensor,
    *,
    crop_min: float,
    flip: float,
    jitter: float,
    grayscale: float,
    blur: float,
) -> ViewParameters:
    """The parameters of one view; `key` stands for (seed, epoch, view)."""
    u = randomness.uniform(key, instance_ids, 2 * NUM_CROP_TRIES + 12)
    crop, rest = u[:, : 2 * NUM_CROP_TRIES + 2], u[:, 2 * NUM_CROP_TRIES + 2 :]
    strengths = torch.tensor([0.8, 0.8, 0.8, 0.2], device=u.device) * jitter
    around_one = torch.tensor([1.0, 1.0, 1.0, 0.0], device=u.device)
    low = (around_one - strengths).clamp(min=-0.5)
    low[:3].clamp_(min=0.0)
    orders = JITTER_ORDERS.to(u.device)
    return ViewParameters(
        boxes=crop_boxes(crop, heights, widths, crop_min),
        flip=rest[:, 0] < flip,
        jitter=(rest[:, 1] < 0.8) & (jitter > 0),
        factors=low + rest[:, 2:6] * (around_one + strengths - low),
        order=orders[(rest[:, 6] * len(orders)).long()],
        gray=rest[:, 7] < grayscale,
        blur=rest[:, 8] < blur,
        sigma=0.1 + rest[:, 9] * (2.0 - 0.1),
    )


def join(parameters: list[ViewParameters], device: torch.device) -> ViewParameters:
    """Several batches of parameters as one, on the device."""
    names = [field.name for field in fields(ViewParameters)]
    return ViewParameters(**{name: torch.cat([getattr(p, name) for p in parameters]).to(device) for name in names})


def crop_boxes(u: Tensor, heights: Tensor, widths: Tensor, area_min: float) -> Float[Tensor, "images 4"]:
    """Random resized crop as torchvision draws it: ten tries for (area, aspect ratio), else the largest central box."""
    heights, widths = heights.to(u.dtype), widths.to(u.dtype)
    tries = u[:, : 2 * NUM_CROP_TRIES].reshape(-1, NUM_CROP_TRIES, 2)
    area = (heights * widths)[:, None] * (area_min + tries[..., 0] * (1 - area_min))
    log_low, log_high = math.log(ASPECT_RATIO[0]), math.log(ASPECT_RATIO[1])
    ratio = torch.exp(log_low + tries[..., 1] * (log_high - log_low))
    width, height = torch.sqrt(area * ratio).round(), torch.sqrt(area / ratio).round()  # [images, tries]
    fits = (width >= 1) & (width <= widths[:, None]) & (height >= 1) & (height <= heights[:, None])
    first = fits.to(torch.int64).argmax(dim=1, keepdim=True)
    width, height = width.gather(1, first)[:, 0], height.gather(1, first)[:, 0]
    # No try fits an image that is very long: take all of its short side.
    none_fits = ~fits.any(dim=1)
    width = torch.where(none_fits, torch.minimum(widths, (heights * ASPECT_RATIO[1]).round()), width).clamp(min=1)
    height = torch.where(none_fits, torch.minimum(heights, (widths / ASPECT_RATIO[0]).round()), height).clamp(min=1)
    where = torch.where(none_fits[:, None], torch.full_like(u[:, -2:], 0.5), u[:, -2:])
    top = (where[:, 0] * (heights - height + 1)).floor().clamp(max=heights - height)
    left = (where[:, 1] * (widths - width + 1)).floor().clamp(max=widths - width)
    return torch.stack([top, left, height, width], dim=1)


def plain_boxes(heights: Tensor, widths: Tensor, size: int) -> Float[Tensor, "images 4"]:
    """The view without chance: the central square; above 64 px its middle 7/8, as is usual for photos."""
    side = torch.minimum(heights, widths).float()
    if size > 64:
        side = (side * 7 / 8).round().clamp(min=1)
    return torch.stack([((heights - side) / 2).floor(), ((widths - side) / 2).floor(), side, side], dim=1)


def resample(
    images: UInt8[Tensor, "images channels height width"], boxes: Float[Tensor, "images 4"], size: int
) -> Float[Tensor, "images channels size size"]:
    """Crop and resize with antialiasing, two matrix products per image: rows @ image @ columns^T."""
    rows = _resample_matrix(boxes[:, 0], boxes[:, 2], images.shape[2], size)
    columns = _resample_matrix(boxes[:, 1], boxes[:, 3], images.shape[3], size)
    pixels = images.float() / 255
    return rows[:, None] @ (pixels @ columns[:, None].mT)


def _resample_matrix(start: Tensor, length: Tensor, num_in: int, num_out: int) -> Float[Tensor, "images out in"]:
    """Triangle filter from the pixels [start, start + length) to num_out pixels; widened when it shrinks."""
    scale = (length / num_out)[:, None, None]
    places_in = torch.arange(num_in, device=start.device) + 0.5
    places_out = torch.arange(num_out, device=start.device) + 0.5
    centers = start[:, None, None] + places_out[None, :, None] * scale
    weights = (1 - (places_in[None, None, :] - centers).abs() / scale.clamp(min=1)).clamp(min=0)
    inside = (places_in >= start[:, None]) & (places_in <= (start + length)[:, None])  # [images, in]
    weights = weights * inside[:, None, :]
    return weights / weights.sum(dim=2, keepdim=True)


def distort(
    crops: Float[Tensor, "images 3 size size"], parameters: ViewParameters
) -> Float[Tensor, "images 3 size size"]:
    """Flip, color jitter in each image's own order, grayscale, blur."""
    x = torch.where(parameters.flip[:, None, None, None], crops.flip(3), crops)
    operations = (brightness, contrast, saturation, hue)
    for place in range(4):
        for number, operation in enumerate(operations):
            chosen = (parameters.jitter & (parameters.order[:, place] == number)).nonzero()[:, 0]
            if len(chosen):
                x[chosen] = operation(x[chosen], parameters.factors[chosen, number])
    x = torch.where(parameters.gray[:, None, None, None], luma(x).expand_as(x), x)
    chosen = parameters.blur.nonzero()[:, 0]
    if len(chosen):
        x[chosen] = gaussian_blur(x[chosen], parameters.sigma[chosen])
    return x


def luma(x: Tensor) -> Tensor:
    """Brightness as the eye sees it: [images, 1, height, width]."""
    return 0.2989 * x[:, 0:1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:3]


def _blend(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    factor = factor[:, None, None, None]
    return (factor * x + (1 - factor) * other).clamp(0, 1)


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    return _blend(x, torch.zeros_like(x), factor)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    return _blend(x, luma(x).mean(dim=(1, 2, 3), keepdim=True), factor)


def saturation(x: Tensor, factor: Tensor) -> Tensor:
    return _blend(x, luma(x), factor)


def hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the color circle by `shift` turns (-0.5 to 0.5), through HSV."""
    value, brightest = x.max(dim=1)
    chroma = value - x.min(dim=1).values
    safe = torch.where(chroma == 0, torch.ones_like(chroma), chroma)
    r, g, b = x.unbind(dim=1)
    sector = torch.where(
        brightest == 0, (g - b) / safe, torch.where(brightest == 1, 2 + (b - r) / safe, 4 + (r - g) / safe)
    )
    sector = (sector + 6 * shift[:, None, None]) % 6  # 0 red, 2 green, 4 blue
    # Each channel falls from `value` by the chroma, as a trapezoid of the distance on the circle.
    offsets = torch.tensor([5.0, 3.0, 1.0], device=x.device)[None, :, None, None]
    turn = (offsets + sector[:, None]) % 6
    fall = torch.minimum(turn, 4 - turn).clamp(0, 1)
    return value[:, None] - chroma[:, None] * fall


def gaussian_blur(x: Tensor, sigma: Tensor) -> Tensor:
    """A separable blur with each image's own sigma; the kernel is a tenth of the side, odd, at least 3."""
    num_images, num_channels, height, width = x.shape
    radius = min(blur_kernel_size(width) // 2, height - 1, width - 1)
    offsets = torch.arange(-radius, radius + 1, device=x.device, dtype=x.dtype)
    kernel = torch.exp(-0.5 * (offsets / sigma[:, None]) ** 2)
    kernel = (kernel / kernel.sum(dim=1, keepdim=True)).repeat_interleave(num_channels, dim=0)  # [images x channels, k]
    flat = F.pad(x, [radius] * 4, mode="reflect").reshape(1, num_images * num_channels, height + 2 * radius, -1)
    flat = F.conv2d(flat, kernel[:, None, :, None], groups=num_images * num_channels)
    flat = F.conv2d(flat, kernel[:, None, None, :], groups=num_images * num_channels)
    return flat.reshape(x.shape)


def blur_kernel_size(side: int) -> int:
    size = int(0.1 * side)
    return max(3, size if size % 2 else size + 1)

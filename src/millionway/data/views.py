"""Random views, a batch at a time, on the device.

The augmentation is SimCLR's, as in the paper: random resized crop, flip, color jitter, grayscale, blur. Every image of
the batch has its own parameters, drawn from (seed, epoch, instance, view) alone. Images are float in [0, 1].
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from itertools import permutations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from millionway import randomness

NUM_CROP_TRIES = 10
ASPECT_RATIO = (3 / 4, 4 / 3)
REACH = 4.0
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
# Values worked on at a time, so that a processor's cache holds them: the fastest of a few powers of two.
RESAMPLED_AT_ONCE, DISTORTED_AT_ONCE = 400_000, 1_600_000
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


def view_keys(seed: int, epoch: int, num_views: int) -> list[int]:
    """Of the views that each image has in an epoch."""
    return [randomness.key_of(seed, "view", epoch, view) for view in range(num_views)]


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


NAMES = [field.name for field in fields(ViewParameters)]


def join(parameters: list[ViewParameters]) -> ViewParameters:
    """Several batches of parameters as one."""
    return ViewParameters(**{name: torch.cat([getattr(p, name) for p in parameters]) for name in NAMES})


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
    images: UInt8[Tensor, "images channels height width"],
    boxes: Float[Tensor, "images 4"],
    flip: Tensor | None,
    size: int,
) -> Float[Tensor, "images channels size size"]:
    """Crop, resize with antialiasing and flip, two matrix products per image: rows @ image @ columns^T."""
    num_images, num_channels, height, width = images.shape
    if flip is None and bool((boxes == boxes[:1]).all()):
        return _resample_alike(images, boxes[:1], size)
    rows = _resample_matrix(boxes[:, 0], boxes[:, 2], height, size)
    columns = _resample_matrix(boxes[:, 1], boxes[:, 3], width, size) / 255
    if flip is not None:
        columns = torch.where(flip[:, None, None], columns.flip(1), columns)
    out = torch.empty(num_images, num_channels, size, size, device=images.device)
    for part in _parts(images, RESAMPLED_AT_ONCE):
        wide = torch.bmm(images[part].flatten(1, 2).float(), columns[part].mT)  # [images, channels x height, size]
        wide = wide.view(-1, num_channels, height, size)
        torch.matmul(rows[part, None], wide, out=out[part])
    return out


def _resample_alike(images: Tensor, box: Tensor, size: int) -> Tensor:
    """The same box of all images: one matrix for all, none if they stay as they are."""
    height, width = images.shape[2:]
    if height == width == size and box[0].tolist() == [0, 0, size, size]:
        return images / 255
    rows = _resample_matrix(box[:, 0], box[:, 2], height, size)[0]
    columns = _resample_matrix(box[:, 1], box[:, 3], width, size)[0] / 255
    return rows @ (images.float() @ columns.T)


def _parts(images: Tensor, num_values: int) -> list[slice]:
    """Slices of the batch of about so many values; on other devices than a processor the whole batch."""
    num = max(1, num_values // images[:1].numel()) if images.device.type == "cpu" else len(images)
    return [slice(start, start + num) for start in range(0, len(images), num)]


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
    crops: Float[Tensor, "images 3 size size"] | UInt8[Tensor, "images 3 size size"],
    parameters: ViewParameters,
    at_once: int = DISTORTED_AT_ONCE,
) -> Float[Tensor, "images 3 size size"]:
    """Color jitter in each image's own order, grayscale, blur; in place, if the crops are float.

    Brightness, contrast and saturation are one formula with different numbers, x -> factor x + to_luma luma +
    to_mean mean luma, so each of their three turns is one operation for the whole batch, whatever each image does in
    it. Hue comes before the turn that each image's order says. at_once: how many values are worked on at a time.

    The parameters are on the CPU: what is done to which image is decided there, and goes to the device at one go.
    """
    out = crops if crops.is_floating_point() else torch.empty(crops.shape, device=crops.device)
    blends = _blends(parameters)
    hue_turn = torch.where(parameters.jitter, (parameters.order == HUE).int().argmax(dim=1), -1)
    for part in _parts(crops, at_once):
        x, sigma = out[part], parameters.sigma[part]
        masks = [*(hue_turn[part] == turn for turn in range(4)), parameters.gray[part], parameters.blur[part]]
        places = [mask.nonzero()[:, 0] for mask in masks]
        reach = REACH * float(sigma[places[-1]].max()) if len(places[-1]) else 0.0
        numbers = [*(blend[part] for blend in blends), parameters.factors[part, HUE], sigma]
        if crops.device.type != "cpu":
            numbers, places = _sent(numbers, places, crops.device)
        *blend, shift, sigma = numbers
        if out is not crops:
            torch.div(crops[part], 255, out=x)
        for turn in range(4):
            _on_some(x, places[turn], hue, shift)
            if turn < 3:
                _blend_(x, *(each[:, turn, None, None, None] for each in blend))
        _on_some(x, places[4], lambda some: luma(some).expand_as(some))
        _on_some(x, places[5], partial(gaussian_blur, reach=reach), sigma)
    return out


def _sent(numbers: list[Tensor], places: list[Tensor], device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Both on the device, by one copy that nobody waits for."""
    parts = [*(each.contiguous().view(torch.int32) for each in numbers), *(each.to(torch.int32) for each in places)]
    packed = torch.cat([each.flatten() for each in parts])
    packed = (packed.pin_memory() if device.type == "cuda" else packed).to(device, non_blocking=True)
    there = [there.view(each.shape) for there, each in zip(packed.split([each.numel() for each in parts]), parts)]
    return [each.view(torch.float32) for each in there[: len(numbers)]], [each.long() for each in there[len(numbers) :]]


def _blends(parameters: ViewParameters) -> tuple[Tensor, Tensor, Tensor]:
    """(factor, to_luma, to_mean) of the three turns of each image: [images, 3] each."""
    kind = parameters.order[parameters.order != HUE].view(-1, 3)
    factor = torch.where(parameters.jitter[:, None], parameters.factors.gather(1, kind), 1.0)
    return factor, (1 - factor) * (kind == SATURATION), (1 - factor) * (kind == CONTRAST)


def _blend_(x: Tensor, factor: Tensor, to_luma: Tensor, to_mean: Tensor) -> None:
    if len(x) == 1 and x.device.type == "cpu" and not (to_luma.any() or to_mean.any()):
        if float(factor) != 1:  # brightness, which needs no luma
            x.mul_(factor).clamp_(0, 1)
        return
    light = luma(x)
    base = light * to_luma + light.mean(dim=(1, 2, 3), keepdim=True) * to_mean
    torch.addcmul(base, x, factor, out=x).clamp_(0, 1)


def _on_some(x: Tensor, places: Tensor, operation: Callable[..., Tensor], *numbers: Tensor) -> None:
    if len(places) == len(x):
        x.copy_(operation(x, *numbers))
    elif len(places):
        x[places] = operation(x[places], *(each[places] for each in numbers))


def luma(x: Tensor) -> Tensor:
    """Brightness as the eye sees it: [images, 1, height, width]."""
    return (x[:, 0:1] * 0.2989).add_(x[:, 1:2], alpha=0.587).add_(x[:, 2:3], alpha=0.114)


def hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the color circle by `shift` turns (-0.5 to 0.5), through HSV."""
    r, g, b = x.unbind(dim=1)
    value = torch.maximum(torch.maximum(r, g), b)
    chroma = value - torch.minimum(torch.minimum(r, g), b)
    is_r, is_g = r == value, g == value
    sector = torch.where(is_r, g - b, torch.where(is_g, b - r, r - g)).div_(chroma.clamp(min=1e-12))
    begin = (4 - 2.0 * is_g).masked_fill_(is_r, 0)  # 0 red, 2 green, 4 blue
    sector.add_(begin).add_(6 * shift[:, None, None])
    sector.sub_((sector / 6).floor_(), alpha=6)
    # Each channel falls from `value` by the chroma, as a trapezoid of the distance on the circle.
    out = torch.empty_like(x)
    for channel, fall in enumerate((2 - (sector - 3).abs_(), (sector - 2).abs_() - 1, (sector - 4).abs_() - 1)):
        torch.addcmul(value, chroma, fall.clamp_(0, 1), value=-1, out=out[:, channel])
    return out


def gaussian_blur(x: Tensor, sigma: Tensor, reach: float) -> Tensor:
    """A separable blur with each image's own sigma; the kernel is a tenth of the side, odd, at least 3.

    Weights beyond `reach`, REACH times the largest sigma, are left out: less than a ten-thousandth of the sum.
    """
    radius = min(blur_kernel_size(x.shape[3]) // 2, x.shape[2] - 1, x.shape[3] - 1, math.ceil(reach))
    offsets = torch.arange(radius + 1, device=x.device, dtype=x.dtype)
    kernel = torch.exp(-0.5 * (offsets / sigma[:, None]) ** 2)  # [images, radius + 1], one half of it
    kernel = (kernel / (2 * kernel.sum(dim=1, keepdim=True) - 1))[:, :, None, None, None]
    x = F.pad(x, [radius] * 4, mode="reflect")
    for axis in (3, 2):
        middle = x.shape[axis] - 2 * radius
        out = x.narrow(axis, radius, middle) * kernel[:, 0]
        for offset in range(1, radius + 1):
            both = x.narrow(axis, radius - offset, middle) + x.narrow(axis, radius + offset, middle)
            out.addcmul_(both, kernel[:, offset])
        x = out
    return x


def blur_kernel_size(side: int) -> int:
    size = int(0.1 * side)
    return max(3, size if size % 2 else size + 1)

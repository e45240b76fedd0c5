"""Each operation against torchvision's, at fixed parameters; and the distribution of the crops."""

import numpy as np
import pytest
import torch
import torchvision.transforms.v2 as v2
import torchvision.transforms.v2.functional as tv
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from millionway import randomness
from millionway.data import views

AUGMENTATION = {"crop_min": 0.08, "flip": 0.5, "jitter": 1.0, "grayscale": 0.2, "blur": 0.5}


def batch(num: int = 6, side: int = 24) -> torch.Tensor:
    return torch.rand(num, 3, side, side, generator=torch.Generator().manual_seed(0))


@given(height=st.integers(1, 40), width=st.integers(1, 40), size=st.integers(1, 33), seed=st.integers(0, 1000))
def test_resample_is_crop_and_antialiased_resize(height: int, width: int, size: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (1, 3, height, width), generator=g, dtype=torch.uint8)
    h, w = (
        int(torch.randint(1, height + 1, (1,), generator=g)),
        int(torch.randint(1, width + 1, (1,), generator=g)),
    )
    top, left = (
        int(torch.randint(0, height - h + 1, (1,), generator=g)),
        int(torch.randint(0, width - w + 1, (1,), generator=g)),
    )
    box, flip = torch.tensor([[top, left, h, w]] * 2, dtype=torch.float32), torch.tensor([False, True])
    ours = views.resample(image.repeat(2, 1, 1, 1), box, flip, size)
    theirs = tv.resized_crop(image.float() / 255, top, left, h, w, [size, size], antialias=True)
    assert torch.allclose(ours[:1], theirs, atol=1e-4)
    assert torch.allclose(ours[1], ours[0].flip(2), atol=1e-6)


JITTER = [tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("place", range(4))
def test_color_operations_are_torchvisions(number: int, place: int) -> None:
    """One of the four, at each place of the order; the others do nothing."""
    x = batch()
    x[1] = x[1].mean(0, keepdim=True)  # a gray image
    x[2, :, 3:9] = 0.5  # a gray patch
    values = torch.tensor([-0.2, -0.1, 0.0, 0.07, 0.2, 0.5] if number == views.HUE else [0.2, 0.7, 1.0, 1.4, 1.8, 0.0])
    expected = torch.stack([JITTER[number](image, float(value)) for image, value in zip(x, values)])
    factors = torch.tensor([1.0, 1.0, 1.0, 0.0]).repeat(6, 1)
    factors[:, number] = values
    order = [other for other in range(4) if other != number]
    order.insert(place, number)
    no, yes = torch.zeros(6, dtype=torch.bool), torch.ones(6, dtype=torch.bool)
    p = views.ViewParameters(torch.zeros(6, 4), no, yes, factors, torch.tensor([order] * 6), no, no, torch.ones(6))
    assert torch.allclose(views.distort(x.clone(), p), expected, atol=2e-5)


def test_blur_is_torchvisions() -> None:
    for side in (8, 32, 64):
        x, sigmas = batch(4, side), [0.1, 0.5, 1.3, 2.0]
        size = views.blur_kernel_size(side)
        expected = torch.stack([tv.gaussian_blur(image, [size, size], [s, s]) for image, s in zip(x, sigmas)])
        assert torch.allclose(
            views.gaussian_blur(x, torch.tensor(sigmas), views.REACH * max(sigmas)), expected, atol=1e-5
        )
    assert [views.blur_kernel_size(side) for side in (8, 32, 64, 96, 224)] == [3, 3, 7, 9, 23]


def test_whole_distortion_equals_the_operations_one_by_one() -> None:
    ids = torch.arange(64)
    sides = torch.full((64,), 24)
    p = views.draw_parameters(randomness.key_of(0, "test"), ids, sides, sides, **AUGMENTATION)
    x = batch(64)
    result = views.distort(x.clone(), p)
    for i in range(64):
        image = x[i]
        if p.jitter[i]:
            for number in p.order[i].tolist():
                image = JITTER[number](image, float(p.factors[i, number]))
        if p.gray[i]:
            image = tv.rgb_to_grayscale(image, num_output_channels=3)
        if p.blur[i]:
            image = tv.gaussian_blur(image, [3, 3], [float(p.sigma[i])] * 2)
        assert torch.allclose(result[i], image, atol=1e-4)
    assert 0.3 < p.flip.float().mean() < 0.7 and 0.6 < p.jitter.float().mean() < 0.95


def test_crops_are_distributed_as_torchvisions() -> None:
    num, height, width = 4000, 60, 90
    u = randomness.uniform(7, torch.arange(num), 2 * views.NUM_CROP_TRIES + 2)
    ours = views.crop_boxes(u, torch.full((num,), height), torch.full((num,), width), 0.08).numpy()
    torch.manual_seed(0)
    crop = v2.RandomResizedCrop(8, scale=(0.08, 1.0))
    image = torch.zeros(3, height, width)
    drawn = [crop.make_params([image]) for _ in range(num)]
    theirs = np.array([[p["top"], p["left"], p["height"], p["width"]] for p in drawn], dtype=float)
    error = theirs.std(axis=0) / np.sqrt(num)
    assert (abs(ours.mean(axis=0) - theirs.mean(axis=0)) < 5 * error).all()
    assert np.allclose(ours.std(axis=0), theirs.std(axis=0), rtol=0.06)
    assert (ours[:, 0] + ours[:, 2] <= height).all() and (ours[:, 1] + ours[:, 3] <= width).all() and (ours >= 0).all()


def test_crops_of_extreme_shapes_stay_inside() -> None:
    heights, widths = torch.tensor([1, 1, 500, 3]), torch.tensor([1, 500, 1, 2])
    u = randomness.uniform(7, torch.arange(4), 2 * views.NUM_CROP_TRIES + 2)
    top, left, height, width = views.crop_boxes(u, heights, widths, 0.08).unbind(1)
    assert bool(((height >= 1) & (width >= 1) & (top + height <= heights) & (left + width <= widths)).all())


def test_plain_view_is_the_central_square() -> None:
    assert views.plain_boxes(torch.tensor([10]), torch.tensor([20]), 8).tolist() == [[0, 5, 10, 10]]
    assert views.plain_boxes(torch.tensor([256]), torch.tensor([256]), 224).tolist() == [[16, 16, 224, 224]]


def test_a_file_and_memory_give_the_same_crops(tmp_path) -> None:
    from millionway.data.dataset import open_dataset
    from millionway.data.stores import FileStore, MemoryStore

    rng = np.random.default_rng(0)
    for index in range(5):
        Image.fromarray(rng.integers(0, 255, (48, 40, 3), dtype=np.uint8)).save(tmp_path / f"{index}.png")
    dataset = open_dataset(str(tmp_path))
    assert isinstance(dataset.store, MemoryStore)
    files = FileStore(dataset.source, dataset.manifest, 2, 0.01)
    ids = torch.tensor([4, 0, 2])
    p = views.draw_parameters(3, ids, files.heights[ids], files.widths[ids], **AUGMENTATION)
    _, ours = dataset.store.views(ids, [p], 32, distorted=False)
    _, theirs = files.views(ids, [p], 32, distorted=False)
    assert float((ours - theirs / 255).abs().max()) < 1.5 / 255
    files.close()


def test_whole_views_are_distributed_as_torchvisions() -> None:
    """Means and deviations of the colors, and how rough views are, over many views of one real photo."""
    from sklearn.datasets import load_sample_image

    photo = Image.fromarray(load_sample_image("flower.jpg")).resize((48, 36))
    pixels = torch.from_numpy(np.array(photo)).permute(2, 0, 1)
    num, size = 2000, 32
    ids, heights, widths = torch.arange(num), torch.full((num,), 36), torch.full((num,), 48)
    p = views.draw_parameters(randomness.key_of(0, "moments"), ids, heights, widths, **AUGMENTATION)
    ours = views.distort(views.resample(pixels.expand(num, -1, -1, -1), p.boxes, p.flip, size), p)
    torch.manual_seed(0)
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(size, scale=(0.08, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
            v2.RandomGrayscale(0.2),
            v2.RandomApply([v2.GaussianBlur(3, (0.1, 2.0))], p=0.5),
        ]
    )
    theirs = torch.stack([transform(pixels / 255) for _ in range(num)])

    def moments(x: torch.Tensor) -> torch.Tensor:
        """[views, 12]"""
        rough = (x[..., 1:] - x[..., :-1]).abs().mean(dim=(2, 3))
        return torch.cat([x.mean(dim=(2, 3)), x.std(dim=(2, 3)), rough, x.amax(dim=(2, 3))], dim=1)

    a, b = moments(ours), moments(theirs)
    error = ((a.var(dim=0) + b.var(dim=0)) / num).sqrt()
    assert bool(((a.mean(dim=0) - b.mean(dim=0)).abs() < 4 * error).all())
    assert torch.allclose(a.std(dim=0), b.std(dim=0), rtol=0.08)

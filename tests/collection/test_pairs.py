import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from millionway.collection.looks import small_pixels
from millionway.collection.pairs import likeness
from millionway.data.images import decode


def photo(seed: int, side: int = 64) -> Image.Image:
    """Smooth blobs of color."""
    draw = np.random.default_rng(seed)
    coarse = Image.fromarray(draw.integers(0, 256, (7, 7, 3), dtype=np.uint8))
    return coarse.resize((side, side), Image.Resampling.BICUBIC)


def jpeg(image: Image.Image) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=30)
    return decode(buffer.getvalue())


def like(one: Image.Image, other: Image.Image) -> float:
    pixels = [torch.tensor(small_pixels(each)).permute(2, 0, 1)[None].float() / 255 for each in (one, other)]
    return float(likeness(*pixels))


COPIES = {
    "jpeg": jpeg,
    "half": lambda image: image.resize((32, 32)),
    "crop": lambda image: image.crop((5, 1, 63, 59)),
    "darker": lambda image: ImageEnhance.Brightness(image).enhance(0.8),
    "mirror": ImageOps.mirror,
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_is_alike_and_another_image_is_not(kind: str):
    for seed in range(20):
        image = photo(seed)
        assert like(image, COPIES[kind](image)) > 0.9, seed
        assert like(COPIES[kind](image), image) > 0.9, seed
        assert like(photo(seed + 100), COPIES[kind](image)) < 0.9, seed


def test_the_same_shape_in_another_color_is_another_image():
    shape = np.zeros((32, 32, 3), np.uint8)
    shape[8:24, 8:24] = (255, 30, 30)
    other = shape[:, :, ::-1].copy()
    assert like(Image.fromarray(shape), Image.fromarray(other)) == 0


def test_images_without_content_are_alike_only_if_their_pixels_are():
    gray, same, dark = (Image.new("RGB", (40, 40), (value,) * 3) for value in (128, 129, 20))
    assert like(gray, same) == 1
    assert like(gray, dark) == 0
    assert like(gray, photo(0)) == 0

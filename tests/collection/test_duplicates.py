"""Groups of copies, and how alike two images must be."""

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits

from millionway.collection.duplicates import LIKENESS, MOST_ASKED, groups, least_likeness
from millionway.collection.looks import Looks, small_pixels
from millionway.collection.neighbors import nearest

NO_PAIRS = torch.zeros(0, 2, dtype=torch.int64)


def different(num: int) -> np.ndarray:
    return np.array([f"content {number}" for number in range(num)])


def test_a_chain_of_small_differences_is_not_one_group():
    chain = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4], [4, 5]])
    found = groups(chain, different(7))
    assert found[6] == -1
    for number in range(found.max() + 1):
        members = set(np.flatnonzero(found == number).tolist())
        assert any(members <= {center - 1, center, center + 1} for center in members)


def test_the_picture_with_the_most_others_alike_to_it_is_the_center():
    star = torch.tensor([[0, 3], [1, 3], [2, 3], [0, 4]])
    assert groups(star, different(5)).tolist() == [0, 0, 0, 0, -1]


def test_images_with_the_same_content_are_one_picture():
    hashes = different(6)
    hashes[[1, 3, 5]] = "same"
    assert groups(NO_PAIRS, hashes).tolist() == [-1, 0, -1, 0, -1, 0]
    assert groups(torch.tensor([[3, 4], [1, 5]]), hashes).tolist() == [-1, 0, -1, 0, 0, 0]
    assert groups(NO_PAIRS, different(3)).tolist() == [-1] * 3
    assert groups(NO_PAIRS, np.array(["", ""])).tolist() == [-1, -1]  # nobody knows


def looks_of(images: list[Image.Image]) -> tuple[Looks, torch.Tensor]:
    """Their looks, and their pixels as vectors."""
    small = np.stack([small_pixels(image.convert("RGB")) for image in images])
    vectors = F.normalize(torch.tensor(small).float().flatten(1))
    return Looks(pa.table({"small": pa.array([each.tobytes() for each in small], pa.binary(3 * 32 * 32))})), vectors


def test_where_all_images_are_nearly_alike_a_copy_must_be_more_alike():
    pixels = load_digits(return_X_y=True)[0][:600].reshape(-1, 8, 8)
    digits = [Image.fromarray((image * 15).astype(np.uint8)) for image in pixels]
    looks, vectors = looks_of(digits)
    assert LIKENESS < least_likeness(nearest(vectors), looks) <= MOST_ASKED
    draw = np.random.default_rng(0)
    photos = [Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((32, 32)) for _ in range(200)]
    looks, vectors = looks_of(photos)
    assert least_likeness(nearest(vectors), looks) == LIKENESS
    few, vectors = looks_of(digits[:20])
    assert least_likeness(nearest(vectors), few) == LIKENESS

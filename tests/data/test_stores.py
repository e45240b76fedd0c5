from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from millionway import randomness
from millionway.data import views
from millionway.data.batches import plain_batches, view_batches
from millionway.data.dataset import open_dataset
from millionway.data.stores import FileStore, TooManyUnreadable

AUGMENTATION = {"crop_min": 0.08, "flip": 0.5, "jitter": 1.0, "grayscale": 0.2, "blur": 0.5}
CPU = torch.device("cpu")


@pytest.fixture
def photos(tmp_path):
    """Twelve JPEGs of different sizes, so that they are read from files."""
    rng = np.random.default_rng(0)
    for index in range(12):
        small = rng.integers(0, 255, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(small).resize((200 + index, 150), Image.Resampling.BICUBIC).save(tmp_path / f"{index:02d}.jpg")
    return tmp_path


def batches(dataset, keys, ids):
    return next(view_batches(dataset.store, [(keys, ids)], 32, CPU, **AUGMENTATION))


def test_views_depend_on_key_and_instance_alone(photos) -> None:
    dataset = open_dataset(str(photos))
    assert isinstance(dataset.store, FileStore)
    keys = [randomness.key_of(0, "view", 2, view) for view in range(2)]
    views, ids = batches(dataset, keys, torch.tensor([3, 8, 5]))
    assert views.shape == (6, 3, 32, 32) and ids.tolist() == [3, 8, 5, 3, 8, 5]
    assert float(views.min()) >= 0 and float(views.max()) <= 1
    again, _ = batches(dataset, keys, torch.tensor([5, 3]))
    # The same but for JPEG's decoding scale, which is chosen per image, so exactly the same.
    assert torch.allclose(again[0], views[2], atol=1e-6) and torch.allclose(again[3], views[3], atol=1e-6)
    other, _ = batches(dataset, [randomness.key_of(0, "view", 3, 0)], torch.tensor([3]))
    assert not torch.allclose(other[0], views[0], atol=0.01)


@pytest.mark.parametrize("size", [(1170, 2532), (1242, 2688), (1025, 1536), (682, 1024), (1001, 37)])
def test_phone_photos_of_any_shape_can_be_read(tmp_path, size: tuple[int, int]) -> None:
    """JPEG's smaller scales round each side up on its own."""
    Image.linear_gradient("L").resize(size).save(tmp_path / "a.jpg")
    Image.new("RGB", (300, 200)).save(tmp_path / "b.png")
    dataset = open_dataset(str(tmp_path))
    for pixels in (8, 32, 64, 200):
        (images, ids), *_ = plain_batches(dataset.store, torch.arange(2), pixels, 2, CPU)
        assert ids.tolist() == [0, 1] and images.shape == (2, 3, pixels, pixels)


def test_jpeg_scaling_changes_little(photos) -> None:
    dataset = open_dataset(str(photos))
    ids = torch.arange(12)
    (images, _), *_ = plain_batches(dataset.store, ids, 32, 12, CPU)
    for index in range(12):
        image = Image.open(photos / f"{index:02d}.jpg").convert("RGB")
        left = (image.width - 150) // 2
        square = image.crop((left, 0, left + 150, 150)).resize((32, 32), Image.Resampling.BILINEAR)
        difference = np.abs(np.asarray(square) / 255.0 - images[index].permute(1, 2, 0).numpy())
        assert difference.mean() < 0.02


def test_order_is_kept_and_the_last_batch_is_smaller(photos) -> None:
    dataset = open_dataset(str(photos))
    ids = torch.tensor([7, 1, 4, 11, 0])
    parts = list(plain_batches(dataset.store, ids, 16, 2, CPU))
    assert [len(images) for images, _ in parts] == [2, 2, 1]
    assert torch.cat([part for _, part in parts]).tolist() == ids.tolist()


def test_an_image_that_fails_later_gives_its_place_away(photos, caplog) -> None:
    dataset = open_dataset(str(photos))
    (photos / "04.jpg").unlink()
    # A training batch keeps its size; without augmentation the image is left out.
    views, ids = batches(dataset, [1], torch.tensor([4, 5, 6]))
    assert ids.tolist() == [5, 5, 6] and len(views) == 3
    images, ids = next(plain_batches(dataset.store, torch.tensor([4, 5, 6]), 16, 3, CPU))
    assert ids.tolist() == [5, 6] and len(images) == 2
    assert "04.jpg" in caplog.text
    # One is borne in a set of twelve; the second one stops the run.
    Image.new("RGB", (9, 300)).save(photos / "05.jpg")
    with pytest.raises(TooManyUnreadable, match=r"05.jpg: it changed"):
        list(plain_batches(dataset.store, torch.tensor([5, 6]), 16, 2, CPU))


@pytest.mark.parametrize("many", [0, 1000])  # processes, threads
def test_batches_that_somebody_keeps_are_not_written_over(photos, monkeypatch, many: int) -> None:
    monkeypatch.setattr("millionway.data.readers.MANY", many)
    dataset = open_dataset(str(photos), num_threads=2)
    asked = [([7, 8], torch.tensor([step % 12, (step + 5) % 12, 3])) for step in range(8)]
    one_by_one = [views.clone() for views, _ in view_batches(dataset.store, asked, 32, CPU, **AUGMENTATION)]
    kept = [views[2:4] for views, _ in view_batches(dataset.store, asked, 32, CPU, **AUGMENTATION)]
    assert all(torch.equal(whole[2:4], part) for whole, part in zip(one_by_one, kept))
    monkeypatch.setattr("millionway.data.stores.SPACE_BYTES", 3 * 2 * 3 * 32 * 32 * 4 - 1)  # two images at a time
    in_parts = list(view_batches(dataset.store, asked, 32, CPU, **AUGMENTATION))
    assert all(torch.equal(whole, views) for whole, (views, _) in zip(one_by_one, in_parts))
    dataset.store.close()


def test_two_readers_at_once_get_their_own_images(photos, monkeypatch) -> None:
    """Training reads ahead while an evaluation reads."""
    monkeypatch.setattr("millionway.data.readers.MANY", 0)
    dataset = open_dataset(str(photos), num_threads=2)
    ids = torch.arange(12)
    (expected, _), *_ = plain_batches(dataset.store, ids, 32, 12, CPU)

    def read(shift: int) -> bool:
        own = ids.roll(shift)
        read_ids, crops = dataset.store.crops(own, [views.plain_boxes(*_sizes(dataset, own), 32)], 32)
        return torch.equal(crops / 255, expected[read_ids]) and torch.equal(read_ids, own)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(40)))
    dataset.store.close()


def _sizes(dataset, ids):
    return dataset.store.heights[ids], dataset.store.widths[ids]

"""Decoded images kept in one file."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import millionway
from millionway.data import packed, views
from millionway.data.dataset import open_dataset
from millionway.data.packed import pack
from millionway.data.stores import FileStore


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Photos of different sizes and kinds; the cache is a folder beside them."""
    monkeypatch.setenv("MILLIONWAY_PIXELS", str(tmp_path / "pixels"))
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for index in range(24):
        small = Image.fromarray(rng.integers(0, 255, (6, 8, 3), dtype=np.uint8))
        kind = "png" if index % 3 else "jpg"
        small.resize((60 + 17 * index, 48 + 5 * index), Image.Resampling.BICUBIC).save(folder / f"{index:02d}.{kind}")
    (folder / "07.png").write_bytes(b"rubbish")
    return folder


def test_crops_are_those_of_the_files(photos: Path, tmp_path: Path) -> None:
    dataset = open_dataset(str(photos), max_unreadable=0.1)
    files, ids = dataset.store, dataset.instance_ids
    assert isinstance(files, FileStore)
    store = pack(dataset.source, dataset.manifest, 32, 2)
    assert store.kept_sizes[0].tolist() == [37, 46] and store.kept_sizes[7].tolist() == [
        0,
        0,
    ]  # the shorter side is 32 x 8 / 7
    # Large boxes: what was made small first loses little. Small boxes are blurred, as the documents say.
    boxes = torch.stack([torch.zeros(len(ids)), torch.zeros(len(ids)), files.heights[ids], files.widths[ids]], dim=1)
    read, ours = store.crops(ids, [boxes], 32)
    _, theirs = files.crops(ids, [boxes], 32)
    assert torch.equal(read, ids) and float((ours / 255 - theirs / 255).abs().mean()) < 0.01
    p = views.draw_parameters(3, ids, files.heights[ids], files.widths[ids], **AUGMENTATION)
    _, ours = store.views(ids, [p], 32, distorted=False)
    _, theirs = files.views(ids, [p], 32, distorted=False)
    assert float((ours / 255 - theirs / 255).abs().mean()) < 0.05


AUGMENTATION = {"crop_min": 0.3, "flip": 0.5, "jitter": 1.0, "grayscale": 0.2, "blur": 0.5}


def test_the_file_is_made_once(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(str(photos), max_unreadable=0.1)
    workers = [
        multiprocessing.get_context("fork").Process(target=pack, args=(dataset.source, dataset.manifest, 32, 1))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    (file,) = (tmp_path / "pixels").glob("*.pixels")
    assert file.stat().st_size == packed._layout(dataset.manifest, 37)[1][-1]
    monkeypatch.setattr(packed, "_make", None)  # nobody makes it again
    pack(dataset.source, dataset.manifest, 32, 1)
    with pytest.raises(TypeError):
        pack(dataset.source, dataset.manifest, 64, 1)  # another size is another file


def test_what_cannot_be_kept_is_said_at_the_start(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(str(photos), max_unreadable=0.1)
    (photos / "03.jpg").unlink()
    Image.new("RGB", (50, 50)).save(photos / "04.png")
    with pytest.raises(ValueError, match=r"2 images could be read.*03.jpg: No such file.*04.png: it changed"):
        pack(dataset.source, dataset.manifest, 32, 2)
    monkeypatch.setattr(packed.shutil, "disk_usage", lambda path: type("", (), {"free": 1000}))
    with pytest.raises(ValueError, match=r"needs 0\.0 GB.*MILLIONWAY_PIXELS"):
        pack(dataset.source, dataset.manifest, 32, 2)


def test_a_run_with_a_cache(photos: Path, tmp_path: Path) -> None:
    settings = {"batch_size": 8, "image_size": 32, "threads": 1, "max_unreadable": 0.1, "cache": True, "hardest": 2}
    run = millionway.pretrain(photos, tmp_path / "run", epochs=2, **settings)
    assert "pixels are kept in" in (run / "train.log").read_text()
    assert len(list((tmp_path / "pixels").glob("*.pixels"))) == 1

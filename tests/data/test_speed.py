"""How fast are my images?"""

import numpy as np
from PIL import Image

import millionway
from millionway.cli import main
from millionway.data import speed


def test_a_folder_of_photos_is_measured(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(speed, "SECONDS", 0.2)
    rng = np.random.default_rng(0)
    for index in range(10):
        Image.fromarray(rng.integers(0, 255, (200 + index, 300, 3), dtype=np.uint8)).save(tmp_path / f"{index}.jpg")
    (tmp_path / "broken.jpg").write_bytes(b"rubbish")
    assert main(["bench", "data", "--data", str(tmp_path), "--image-size", "32", "--threads", "1"]) == 0
    text = capsys.readouterr().out
    assert "views with --cache" in text and "An encoder that trains on more than" in text
    speeds = millionway.bench("data", "digits", threads=1)
    assert set(speeds) == {"views"} and speeds["views"] > 0


def test_the_advice_names_what_limits() -> None:
    assert "a faster disk" in speed.advice({"read": 100, "views": 90, "views with --cache": 300})
    assert "Decoding" in speed.advice({"read": 1000, "views": 90, "views with --cache": 300})
    assert "--image-size" in speed.advice({"read": 1000, "views": 90, "views with --cache": 95})
    assert "--image-size" in speed.advice({"views": 90})


def test_it_measures_what_pretrain_would_do(digit_folder, monkeypatch) -> None:
    """Size, number of views and batch of a run on the same images."""
    monkeypatch.setattr(speed, "SECONDS", 0.05)
    seen = []
    batches = speed.view_batches

    def watched(store, keys_and_ids, size, device, **augmentation):
        for views, ids in batches(store, keys_and_ids, size, device, **augmentation):
            seen.append(tuple(views.shape))
            yield views, ids

    monkeypatch.setattr(speed, "view_batches", watched)
    millionway.bench("data", str(digit_folder), threads=1)
    assert set(seen) == {(2 * 15, 3, 16, 16)}

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import millionway
from millionway.reporting.metrics import read_metrics
from millionway.reporting.verdict import FLAT, Verdict
from millionway.settings.pretrain import Pretrain, with_settings
from millionway.train import changes, monitor
from millionway.train.extend import extend, in_words, stretches
from millionway.train.stops import RunStopped

SETTINGS = {"encoder": "narrow-resnet", "image_size": 16, "batch_size": 20, "lr": 0.05, "warmup_epochs": 1}
SETTINGS |= {"labels": "none", "threads": 1, "log_every": 1}


@pytest.fixture
def photos(tmp_path: Path, digit_pixels: np.ndarray) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    add(folder, digit_pixels, 0, 60)
    return folder


def add(folder: Path, pixels: np.ndarray, start: int, stop: int) -> None:
    for number in range(start, stop):
        Image.fromarray(pixels[number]).save(folder / f"{number:03d}.png")


def rates(run: Path) -> list[tuple[float, float]]:
    return [(line["epoch"], line["lr"]) for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "step"]


def test_the_rate_rises_and_falls_in_each_stretch() -> None:
    config = with_settings(Pretrain("digits", Path("x")), epochs=10, lr=0.4, warmup_epochs=2)
    longer = extend(extend(config, 20, 0.1), 60)
    assert longer.training.extended_from == "10@0.4,20@0.1" and longer.training.epochs == 60
    first, second, third = stretches(longer)
    assert [(s.first, s.last, s.warmup, s.peak) for s in (first, second, third)] == [
        (0, 10, 2, 0.4),
        (10, 20, 1, 0.1),
        (20, 60, 2, 0.1),
    ]
    assert second.lr(50, 5) == 0.1 / 5 and second.lr(54, 5) == 0.1 and second.lr(99, 5) < 0.001
    assert "epochs 21 to 60: the learning rate rises to 0.1 again within 2 epochs" in in_words(longer)
    with pytest.raises(ValueError, match=r"--epochs 60: the run has 60 already\. --resume --epochs 120 goes on"):
        extend(longer, 60)


def test_a_finished_run_goes_on(photos: Path, tmp_path: Path, digit_pixels: np.ndarray) -> None:
    run = millionway.pretrain(photos, tmp_path / "run", epochs=2, **SETTINGS)
    before = rates(run)
    with pytest.raises(ValueError, match="--epochs 1: the run has 2 already"):
        millionway.pretrain(out=run, resume=True, epochs=1)
    with pytest.raises(ValueError, match="--lr was"):
        millionway.pretrain(out=run, resume=True, lr=0.1)
    with pytest.raises(ValueError, match="--batch-size was"):
        millionway.pretrain(out=run, resume=True, epochs=4, batch_size=10)
    millionway.pretrain(out=run, resume=True, epochs=4, lr=0.02)
    after = rates(run)
    assert after[: len(before)] == before and len(after) == 2 * len(before)
    assert max(lr for epoch, lr in after if epoch > 2) == 0.02 and after[-1][1] < 0.01
    stored = json.loads((run / "config.json").read_text())["training"]
    assert (stored["epochs"], stored["lr"], stored["extended_from"]) == (4, 0.02, "2@0.05")
    log = (run / "train.log").read_text()
    assert "epochs 3 to 4: the learning rate rises to 0.02 again" in log and "4 of 4" not in log

    # Images came: half as many epochs again, or as many as are asked for.
    add(photos, digit_pixels, 60, 70)
    millionway.pretrain(out=run, resume=True, data_changed=True)
    assert rates(run)[-1][0] == 6.0 and not (run / changes.CHANGED).exists()
    add(photos, digit_pixels, 70, 80)
    millionway.pretrain(out=run, resume=True, data_changed=True, epochs=7)
    assert rates(run)[-1][0] == 7.0
    millionway.pretrain(out=run, resume=True)
    assert "the run is finished; millionway pretrain --resume" in (run / "train.log").read_text()


def test_what_is_refused_leaves_nothing_behind(photos: Path, tmp_path: Path, digit_pixels, monkeypatch) -> None:
    stop = lambda self: (_ for _ in ()).throw(RunStopped("here")) if self.state.step == 4 else None
    monkeypatch.setattr(monitor.Monitor, "sync", stop)
    with pytest.raises(RunStopped):
        millionway.pretrain(photos, tmp_path / "run", epochs=3, save_every=1, **SETTINGS)
    monkeypatch.undo()
    run = tmp_path / "run"
    assert "of 3 epochs so far" in (run / "report.html").read_text()  # drawn although the run stopped
    there = {path.name for path in run.iterdir()}
    for changed in (False, True):
        with pytest.raises(ValueError, match=r"the run is at epoch 1 of 3\. Let it finish"):
            millionway.pretrain(out=run, resume=True, epochs=6, data_changed=changed)
        assert {path.name for path in run.iterdir()} == there
        add(photos, digit_pixels, 60, 65)
    with pytest.raises(ValueError, match="--data-changed takes them over"):
        millionway.pretrain(out=run, resume=True)


def test_a_run_ends_when_it_no_longer_improves(photos: Path, tmp_path: Path, monkeypatch) -> None:
    said = lambda lines, epochs: Verdict(FLAT if lines[-1]["epoch"] >= 2 else "learning", "")
    monkeypatch.setattr(monitor, "verdict", said)
    run = millionway.pretrain(photos, tmp_path / "a", epochs=5, eval_every=1, stop_when_flat=True, **SETTINGS)
    assert rates(run)[-1][0] == 2.0 and (run / "checkpoints" / "step_00000006").is_dir()
    run = millionway.pretrain(photos, tmp_path / "b", epochs=3, eval_every=1, **SETTINGS)
    assert rates(run)[-1][0] == 3.0


def test_time_left_is_said(photos: Path, tmp_path: Path) -> None:
    run = millionway.pretrain(photos, tmp_path / "run", epochs=5, **SETTINGS)
    log = (run / "train.log").read_text()
    assert log.count(" left") == 4 and "epoch 4/5: loss" in log and "5 epochs take about" in log
    assert "a step is" not in log and "waits for images" not in log

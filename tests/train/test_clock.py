"""Where the time of a step goes, and what is said when it is data."""

import time
from pathlib import Path

import pytest
import torch

import millionway
from millionway.data.stores import FileStore
from millionway.reporting.metrics import read_metrics
from millionway.train.clock import Clock

SETTINGS = {"epochs": 2, "batch_size": 32, "threads": 1, "hardest": 2, "labels": "none"}


def test_laps_are_booked_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(Clock, "_now", lambda self: now)
    clock = Clock(torch.device("cpu"))
    assert clock.shares() == {}
    clock.start(True)
    for part, seconds in (("data", 3), ("encoder", 1), ("logging", 5), ("classifier", 1), ("encoder", 5)):
        now += seconds
        clock.lap(part)
    assert clock.shares() == {"data": 0.3, "encoder": 0.6, "classifier": 0.1}
    clock.start(False)
    now += 1
    clock.lap("data")
    assert clock.shares() == {}


def test_a_run_says_where_its_time_goes(digit_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = millionway.pretrain(digit_folder, tmp_path / "quick", verbose=True, **SETTINGS)
    epochs = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "epoch"]
    assert len(epochs) == 2
    for line in epochs:
        assert sum(line[f"{part}_share"] for part in ("data", "encoder", "classifier")) == pytest.approx(1)
    assert "a step is data" in (run / "train.log").read_text()

    # A slow disk: the same images, read from files, each of which takes its time.
    monkeypatch.setattr("millionway.data.stores.SMALL_SIDE", 8)
    crop = FileStore._crop
    monkeypatch.setattr(FileStore, "_crop", lambda *args: time.sleep(0.005) or crop(*args))
    run = millionway.pretrain(digit_folder, tmp_path / "slow", **SETTINGS)
    last = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "epoch"][-1]
    assert last["data_share"] > 0.15
    assert "the encoder waits for images; what helps: " in (run / "train.log").read_text()
    assert "--cache" in (run / "train.log").read_text()

from pathlib import Path

import pytest

import millionway
from millionway.reporting.metrics import read_metrics
from millionway.reporting.verdict import verdict


def run(losses: list[float], **changes: list[float]) -> list[dict]:
    """An evaluation per epoch, ten steps in each; the losses are those of the epochs."""
    num = len(losses)
    usual = {
        "instance_top1": [0.1 + 0.5 * n / num for n in range(num + 1)],
        "effective_rank": [100.0] * (num + 1),
        "positive_cosine": [0.2 + 0.5 * n / num for n in range(num + 1)],
        "hardest_negative_cosine": [0.5] * (num + 1),
    }
    batch_top1 = changes.pop("batch_top1", [0.1] * num)
    usual |= changes
    lines = []
    for epoch in range(num + 1):
        if epoch:
            for step in range(10):
                place = epoch - 1 + (step + 1) / 10
                lines.append(
                    {"kind": "step", "epoch": place, "loss": losses[epoch - 1], "batch_top1": batch_top1[epoch - 1]}
                )
        lines.append({"kind": "evaluation", "epoch": epoch, **{name: values[epoch] for name, values in usual.items()}})
    return lines


FALLING = [9.0 - 0.3 * n for n in range(10)]


def test_words() -> None:
    assert verdict(run(FALLING)).word == "learning"
    assert verdict(run(FALLING)[:1]).word == "too early"
    assert verdict(run([9.0, 8.5, 8.6, 9.5, 12.0])).word == "learning rate too high"
    assert verdict(run([9.0, 8.5, float("nan")])).word == "learning rate too high"
    assert verdict(run(FALLING, effective_rank=[100.0] * 9 + [5.0, 3.0])).word == "collapsed"
    near = {"hardest_negative_cosine": [0.5] * 10 + [0.995], "instance_top1": [0.1] * 11}
    assert verdict(run(FALLING, **near)).word == "collapsed"
    found = [0.1, 0.3, 0.5, 0.55, 0.5, 0.45, 0.4, 0.4, 0.4, 0.4, 0.4]
    assert verdict(run(FALLING, instance_top1=found, batch_top1=[0.1 * n for n in range(1, 11)])).word == "memorizing"
    flat = {"instance_top1": [0.1, 0.3, 0.5] + [0.6] * 8, "positive_cosine": [0.5] * 11}
    stopped = verdict(run([9.0, 8.0, 7.5, 7.2] + [7.0] * 6, **flat))
    assert stopped.word == "no longer improving: you can stop" and "60.0% to 60.0%" in stopped.reasons
    assert verdict(run(FALLING, **flat)).word == "learning"  # the loss still falls


@pytest.mark.slow
def test_words_of_real_runs(tmp_path: Path) -> None:
    shared = {"preset": "digits", "max_images": 640, "eval_every": 1, "log_every": 1}
    good = millionway.pretrain(out=tmp_path / "good", epochs=6, **shared)
    assert verdict(read_metrics(good / "metrics.jsonl")).word == "learning"
    assert (
        "learning (loss" in (good / "train.log").read_text() and "learning (loss" in (good / "report.html").read_text()
    )
    wild = millionway.pretrain(out=tmp_path / "wild", epochs=4, lr=30.0, row_lr=1.0, warmup_epochs=0, **shared)
    assert verdict(read_metrics(wild / "metrics.jsonl")).word in ("learning rate too high", "collapsed")
    numbers = millionway.evaluate("health", good)
    assert numbers["verdict"].startswith("learning") and numbers["effective_rank"] > 5
    assert 0 < numbers["alignment"] < 2 and numbers["uniformity"] < -0.1

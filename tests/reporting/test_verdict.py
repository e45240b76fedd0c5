import json
import math
import sys
from pathlib import Path

import pytest

import millionway
from millionway.reporting.metrics import read_metrics
from millionway.reporting.verdict import FLAT, OF_FULL_VIEWS, SMALL_VIEWS, verdict

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "verdicts"


def run(losses: list[float], num_images: list[int] | int = 1000, **changes: list[float]) -> list[dict]:
    """An evaluation per epoch, ten steps in each; the losses are those of the epochs, up and down by 0.02."""
    num = len(losses)
    usual = {
        "instance_top1": [0.1 + 0.5 * n / num for n in range(num + 1)],
        "effective_rank": [100.0] * (num + 1),
        "positive_cosine": [0.2 + 0.5 * n / num for n in range(num + 1)],
        "hardest_negative_cosine": [0.5] * (num + 1),
    }
    counts = [num_images] * (num + 1) if isinstance(num_images, int) else num_images
    batch_top1 = changes.pop("batch_top1", [0.1] * num)
    usual |= changes
    lines = []
    for epoch in range(num + 1):
        for step in range(10 if epoch else 0):
            number = {"epoch": epoch - 1 + (step + 1) / 10, "lr": 0.1, "num_images": counts[epoch]}
            loss = losses[epoch - 1] + 0.02 * (-1) ** step
            lines.append({"kind": "step", **number, "loss": loss, "batch_top1": batch_top1[epoch - 1]})
        numbers = {name: values[epoch] for name, values in usual.items()}
        lines.append({"kind": "evaluation", "epoch": epoch, "num_images": counts[epoch], **numbers})
    return lines


FALLING = [9.0 - 0.3 * n for n in range(10)]
STILL = {"instance_top1": [0.1] * 11, "positive_cosine": [0.5] * 11}


def test_words() -> None:
    assert verdict(run(FALLING)).word == "learning"
    assert verdict(run(FALLING), epochs=20).word == "learning"
    ended = verdict(run(FALLING), epochs=10)
    assert ended.word == "still improving" and "go on with --resume --epochs 20" in str(ended)
    assert verdict(run(FALLING)[:1]).word == "too early"
    assert verdict(run([7.0, 8.5, 8.6, 9.5, 12.0], instance_top1=[0.1] * 6)).word == "learning rate too high"
    assert verdict(run([9.0, 8.5, float("nan")])).word == "learning rate too high"
    assert verdict(run(FALLING, effective_rank=[100.0] * 9 + [5.0, 3.0])).word == "collapsed"
    near = {"hardest_negative_cosine": [0.5] * 10 + [0.995], "instance_top1": [0.1] * 11}
    assert verdict(run(FALLING, **near)).word == "collapsed"
    found = [0.1, 0.3, 0.5, 0.55, 0.5, 0.45, 0.4, 0.4, 0.4, 0.4, 0.4]
    assert verdict(run(FALLING, instance_top1=found, batch_top1=[0.1 * n for n in range(1, 11)])).word == "memorizing"


def test_learning_is_said_only_beyond_noise() -> None:
    assert verdict(run([6.9] * 10, **STILL)).word == "not learning yet"
    assert "--lr" in verdict(run([6.9] * 10, **STILL)).advice
    one_more = {**STILL, "instance_top1": [0.1] * 10 + [0.12]}  # of 1,000 views: within noise
    assert verdict(run([6.9] * 10, **one_more)).word == "not learning yet"
    assert verdict(run([6.9] * 10, **{**STILL, "instance_top1": [0.1] * 10 + [0.3]})).word == "learning"
    assert verdict(run([6.9] * 2, instance_top1=[0.1] * 3)).word == "too early"


def test_worse_than_at_first_is_never_learning() -> None:
    # Loss 3.452 to 4.498, fresh views 15.6 % to 6.2 %.
    worse = verdict(run([3.452, 3.6, 3.9, 4.2, 4.498], instance_top1=[0.156, 0.12, 0.1, 0.08, 0.07, 0.062]))
    assert worse.word == "learning rate too high"


def test_losses_are_compared_relative_to_ln_n() -> None:
    """125 images until epoch 5, then 225: the loss jumps by ln(225/125) although nothing got worse."""
    excess = [0.0 - 0.2 * n for n in range(10)]
    counts = [125] * 6 + [225] * 5
    losses = [value + math.log(counts[n + 1]) for n, value in enumerate(excess)]
    flat_found = [0.3, 0.3, 0.31, 0.32, 0.33, 0.34, 0.25, 0.28, 0.3, 0.3, 0.3]
    said = verdict(run(losses, counts, instance_top1=flat_found), epochs=10)
    assert said.word == "still improving" and "beyond ln N" in said.reasons


def test_no_longer_improving() -> None:
    flat = {"instance_top1": [0.1, 0.5, 0.8] + [0.95] * 8, "positive_cosine": [0.5] * 11}
    losses = [9.0, 8.0, 7.2] + [7.0] * 7
    said = verdict(run(losses, **flat))
    assert said.word == "no longer improving" and "you can stop" in said.advice and "95.0% to 95.0%" in said.reasons
    assert "more epochs would bring little" in str(verdict(run(losses, **flat), epochs=10))
    assert verdict(run(FALLING, **flat)).word == "learning"  # the loss still falls


def test_a_run_is_not_over_before_views_are_large() -> None:
    lines = run([9.0, 8.0, *[7.0] * 18], instance_top1=[0.1, 0.4, *[0.5] * 19])
    assert verdict(lines).word == FLAT
    small = [line for line in lines if line["kind"] == "evaluation"]
    small[-1][SMALL_VIEWS] = 1.0
    assert verdict(lines).word == "learning"


def test_views_of_other_sizes_are_not_compared() -> None:
    """Large views are harder at first: fewer are found than of small ones, and more and more."""
    found = [0.1 + 0.04 * n for n in range(8)] + [0.25, 0.31, 0.36]
    lines = run([*FALLING[:7], 8.5, 8.0, 7.5], instance_top1=found)
    for line in [line for line in lines if line["kind"] == "evaluation"][:8]:
        line[SMALL_VIEWS] = 1.0
    assert verdict(lines, 10).word == "still improving"
    flat = [*found[:8], 0.3, 0.3, 0.3]
    lines = run([*FALLING[:7], 8.0, 8.0, 8.0], instance_top1=flat)
    for line in [line for line in lines if line["kind"] == "evaluation"][:8]:
        line[SMALL_VIEWS] = 1.0
    assert verdict(lines, 10).word == FLAT and "from epoch 8 to 10" in verdict(lines, 10).reasons


def test_large_views_are_compared_with_large_ones_of_the_first_evaluation() -> None:
    """A run that learns nothing finds more of them than of small ones, as it did before the first step."""
    lines = run(10 * [6.9], instance_top1=8 * [0.075] + 3 * [0.16])
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    for line in evaluations[:8]:
        line[SMALL_VIEWS] = 1.0
    assert verdict(lines, 10).word != "not learning yet"
    evaluations[0] |= {OF_FULL_VIEWS + "instance_top1": 0.16}
    assert verdict(lines, 10).word == "not learning yet" and "16.0% to 16.0%" in verdict(lines, 10).reasons
    assert "7.5% to 7.5%" in verdict(lines[: lines.index(evaluations[7]) + 1], 10).reasons


def test_lines_that_lack_numbers_are_passed_over() -> None:
    assert verdict([{"kind": "step", "epoch": 1}, {"kind": "evaluation", "epoch": 1}] * 5).word == "too early"


def test_every_run_with_a_known_state_is_judged_rightly() -> None:
    """The stored runs of benchmarks/verdicts.py: the words may not go wrong when the rules change."""
    sys.path.insert(0, str(RESULTS.parents[1]))
    try:
        import verdicts
    finally:
        sys.path.pop(0)
    cases = [case for case in verdicts.CASES if verdicts.stored(case.run).exists()]
    judged = [(case.run, *verdicts.judge(case)) for case in cases]
    assert [each for each in judged if not each[-1]] == [] and len(judged) >= 20


@pytest.mark.slow
def test_words_of_real_runs(tmp_path: Path) -> None:
    shared = {"preset": "digits", "max_images": 640, "eval_every": 1, "log_every": 1}
    good = millionway.pretrain(out=tmp_path / "good", epochs=6, **shared)
    assert verdict(read_metrics(good / "metrics.jsonl"), 6).word == "still improving"
    for file in ("train.log", "report.html"):
        assert "still improving: go on with --resume --epochs 12 (loss" in (good / file).read_text()
    wild = millionway.pretrain(out=tmp_path / "wild", epochs=4, lr=30.0, row_lr=1.0, warmup_epochs=0, **shared)
    assert verdict(read_metrics(wild / "metrics.jsonl")).word in ("learning rate too high", "collapsed")
    numbers = millionway.evaluate("health", good)
    assert numbers["verdict"].startswith("still improving") and numbers["effective_rank"] > 5
    assert 0 < numbers["alignment"] < 2 and numbers["uniformity"] < -0.1
    line = json.loads((good / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["num_images"] == 640

"""Continued pretraining: the encoder rests at first, and never becomes worse unseen."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import millionway
from millionway.evaluation.health import views_found
from millionway.model.encoder import EncoderSpec, build_encoder
from millionway.model.encoder_file import save_encoder
from millionway.reporting.metrics import read_metrics
from millionway.train import monitor
from millionway.train.guard import FIRST_NUMBER, NUMBER, judge

SETTINGS = {"batch_size": 40, "image_size": 16, "threads": 1, "labels": "none", "keep": 99, "eval_every": 1}
SETTINGS |= {"given_share": 0.0}  # what leaves a run is what was learned


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    encoder = build_encoder(EncoderSpec("narrow-resnet", "small", 16, (0.5,) * 3, (0.5,) * 3), seed=5)
    save_encoder(encoder, tmp_path / "given.safetensors")
    return tmp_path / "given.safetensors"


def lines(first: float, *others: float) -> list[dict]:
    evaluations = [{"kind": "evaluation", NUMBER: number} for number in others]
    return [{**evaluations[0], FIRST_NUMBER: first}, {"kind": "step", "loss": 1.0}, *evaluations[1:]]


def encoder_of(run: Path, epoch: int) -> dict[str, torch.Tensor]:
    tensors = load_file(run / "checkpoints" / f"step_{3 * epoch:08d}" / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.startswith("network.encoder.")}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_worse_than_the_start_ends_a_run_and_worse_than_the_best_is_not_kept() -> None:
    better = judge(lines(0.5, 0.5, 0.6), 1024)
    assert better.is_kept and not better.is_worse
    noise = judge(lines(0.5, 0.5, 0.48), 1024)
    assert noise.is_kept and not noise.is_worse
    fallen = judge(lines(0.5, 0.5, 0.8, 0.6), 1024)
    assert not fallen.is_kept and not fallen.is_worse
    worse = judge(lines(0.5, 0.5, 0.8, 0.4), 1024)
    assert not worse.is_kept and worse.is_worse
    assert "50.0% with the weights it began with, 40.0% now" in str(worse)
    few = judge(lines(0.5, 0.5, 0.4), 20)
    assert few.is_kept and not few.is_worse


def test_runs_without_these_numbers_are_left_alone() -> None:
    for others in ([], [{"kind": "evaluation", "instance_top1": 0.5}], [{"kind": "evaluation", NUMBER: 0.0}]):
        judgment = judge(others, 1024)
        assert judgment.is_kept and not judgment.is_worse
    turned_off = judge([*lines(0.5, 0.5, 0.1), {"kind": "evaluation"}], 1024)
    assert turned_off.is_kept and not turned_off.is_worse


def test_views_found() -> None:
    one = torch.eye(4)
    assert views_found(one, 3 * one) == 1.0
    assert views_found(one, one[[1, 0, 2, 3]]) == 0.5


def test_while_the_encoder_rests_no_bit_of_it_changes_and_the_rest_learns(
    digit_folder: Path, weights: Path, tmp_path: Path
) -> None:
    options = {**SETTINGS, "guard": False, "save_every": 1}
    run = millionway.pretrain(
        digit_folder, tmp_path / "run", init_from=weights, epochs=3, frozen_epochs=2, head="mlp", **options
    )
    given = {f"network.encoder.backbone.{name}": tensor for name, tensor in load_file(weights).items()}
    assert same(encoder_of(run, 0), given) and same(encoder_of(run, 2), given)
    assert not same(encoder_of(run, 3), given)
    first, later = (load_file(run / "checkpoints" / f"step_{step:08d}" / "model.safetensors") for step in (0, 6))
    changed = {name for name in first if not first[name].equal(later[name])}
    heads = {name for name in first if name.startswith("network.head.")}
    assert changed == heads
    assert not any(name.startswith("momentum.encoder") for name in later)

    before = encoder_of(run, 3)
    for step in range(5, 10):  # it goes on in the middle of an epoch in which the encoder rests
        shutil.rmtree(run / "checkpoints" / f"step_{step:08d}")
    millionway.pretrain(out=run, resume=True)
    assert same(encoder_of(run, 3), before)


def test_fixed_statistics_stay_and_weights_learn(digit_folder: Path, weights: Path, tmp_path: Path) -> None:
    # An evaluation between two epochs must leave them as they are.
    options = {**SETTINGS, "init_from": weights, "epochs": 2, "frozen_epochs": 0, "guard": False}
    given = load_file(weights)
    for bn, moves in (("fixed", False), ("batch", True)):
        run = millionway.pretrain(digit_folder, tmp_path / bn, bn=bn, **options)
        learned = load_file(run / "encoder.safetensors")
        for name, tensor in given.items():
            is_statistic = "running" in name or "num_batches" in name
            assert learned[name].equal(tensor) == (is_statistic and not moves), name


def test_the_encoder_has_a_rate_of_its_own(digit_folder: Path, weights: Path, tmp_path: Path) -> None:
    options = {**SETTINGS, "init_from": weights, "epochs": 1, "frozen_epochs": 0, "momentum": 0.0}
    options |= {"weight_decay": 0.0, "batch_size": 120, "guard": False}
    moved = {}
    for multiple in (1.0, 0.25):
        run = millionway.pretrain(digit_folder, tmp_path / str(multiple), encoder_lr=multiple, **options)
        steps = sorted((run / "checkpoints").glob("step_*"))
        first, last = (load_file(step / "model.safetensors") for step in (steps[0], steps[-1]))
        moved[multiple] = {name: last[name] - first[name] for name in first if name.endswith(".weight")}
    for name in moved[1.0]:
        multiple = 0.25 if ".encoder." in name else 1.0
        assert torch.allclose(moved[0.25][name], multiple * moved[1.0][name], atol=1e-6), name


def test_the_guard_ends_the_run_and_keeps_the_better_encoder(
    digit_folder: Path,
    weights: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    numbers = iter([0.9, 0.9, 0.9, 0.95, 0.6])  # of the weights, after the prior, and after each epoch
    monkeypatch.setattr(monitor, "views_found", lambda *_: next(numbers))
    run = millionway.pretrain(digit_folder, tmp_path / "run", init_from=weights, epochs=6, **SETTINGS)
    evaluations = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "evaluation"]
    assert [line["epoch"] for line in evaluations] == [0, 1, 2, 3]
    assert "worse than the weights it began with" in caplog.text
    kept = load_file(run / "encoder.safetensors")
    assert same({f"network.encoder.backbone.{name}": tensor for name, tensor in kept.items()}, encoder_of(run, 2))
    assert not same(encoder_of(run, 2), encoder_of(run, 3))


def test_without_the_guard_it_goes_on(digit_folder: Path, weights: Path, tmp_path: Path) -> None:
    run = millionway.pretrain(digit_folder, tmp_path / "run", init_from=weights, epochs=2, guard=False, **SETTINGS)
    evaluations = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "evaluation"]
    assert evaluations[-1]["epoch"] == 2 and not any(NUMBER in line for line in evaluations)


def test_a_run_from_random_weights_has_no_guard(
    digit_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "views_found", lambda *_: pytest.fail("it costs time for nothing"))
    millionway.pretrain(digit_folder, tmp_path / "run", epochs=1, **SETTINGS)

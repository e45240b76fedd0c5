from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import millionway
from millionway.model.network import Network
from millionway.reporting.metrics import read_metrics
from millionway.reporting.verdict import OF_FULL_VIEWS, SMALL_VIEWS, first_like_last
from millionway.settings.pretrain import Pretrain, with_settings
from millionway.train import loop
from millionway.train.extend import extend
from millionway.train.sizes import Sizes
from millionway.train.stops import RunStopped

SETTINGS: dict[str, Any] = {"image_size": 16, "first_size": 12, "batch_size": 20, "threads": 1, "labels": "none"}
SETTINGS |= {"epochs": 2, "save_every": 1, "keep": 99, "log_every": 1, "eval_every": 1, "encoder_precision": "float32"}


@given(full=st.integers(8, 64), first=st.integers(8, 64), num_first=st.integers(0, 30), start=st.integers(0, 40))
def test_every_step_has_one_side(full: int, first: int, num_first: int, start: int) -> None:
    sizes = Sizes(full, min(first, full), num_first)
    found = [(step, size) for size, steps in sizes.parts(range(start, 40)) for step in steps]
    assert found == [(step, sizes.first if step < num_first else full) for step in range(start, 40)]
    work = [sizes.work(step + 1) - sizes.work(step) for step in range(40)]
    pixels = [(sizes.first if step < num_first else full) ** 2 / full**2 for step in range(40)]
    assert work == pytest.approx(pixels)


def test_the_sides_of_a_run() -> None:
    config = with_settings(Pretrain("x", Path("y")), epochs=10, lr=0.1, warmup_epochs=1, image_size=64)
    assert Sizes.of(config, 7) == Sizes(64, 64, 49) and Sizes.of(config, 7).shares() == {64: 1.0}
    small_first = with_settings(config, first_size=32)
    assert Sizes.of(small_first, 7) == Sizes(64, 32, 49)
    assert Sizes.of(small_first, 7).shares() == {32: 0.7, 64: pytest.approx(0.3)}
    assert Sizes.of(extend(small_first, 30), 7) == Sizes(64, 32, 49), "more epochs are of the full side"
    only = Sizes.of(with_settings(small_first, epochs=1), 1)
    assert only == Sizes(64, 32, 0) and only.before(0) == 64, "a run of a single step has the full side"


def sides_of_steps(monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None) -> list[int]:
    """Of the views that steps get from now on, each noted; the step of that number fails."""
    sides, step = [], loop.train_step

    def noting(network, classifier, optimizer, views, *rest, **more):
        if len(sides) == fail_at:
            raise RuntimeError("the power went out")
        sides.append(views.shape[-1])
        return step(network, classifier, optimizer, views, *rest, **more)

    monkeypatch.setattr(loop, "train_step", noting)
    return sides


@pytest.mark.parametrize("fail_at", [5, 8, 10])
def test_views_are_small_first_also_in_a_run_that_goes_on(
    digit_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    """12 steps, of which 8 are small: stopped before, at and after the change."""
    with monkeypatch.context() as patch:
        sides = sides_of_steps(patch)
        whole = millionway.pretrain(digit_folder, tmp_path / "whole", **SETTINGS)
        assert sides == 8 * [12] + 4 * [16]
        evaluations = [line for line in read_metrics(whole / "metrics.jsonl") if line["kind"] == "evaluation"]
        assert [SMALL_VIEWS in line for line in evaluations] == [True, True, False]
        of_full = [name for name in evaluations[0] if name.startswith(OF_FULL_VIEWS)]
        assert {name.removeprefix(OF_FULL_VIEWS) for name in of_full} >= {"instance_top1", "effective_rank"}
        assert first_like_last(evaluations)["effective_rank"] == evaluations[0]["full_effective_rank"]
        assert first_like_last(evaluations[:2]) == evaluations[0] and not set(of_full) & set(evaluations[1])
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the power went out"):
        sides_of_steps(patch, fail_at)
        millionway.pretrain(digit_folder, tmp_path / "run", **SETTINGS)
    with monkeypatch.context() as patch:
        sides = sides_of_steps(patch)
        run = millionway.pretrain(out=tmp_path / "run", resume=True)
        assert sides == max(0, 8 - fail_at) * [12] + min(4, 12 - fail_at) * [16]
    weights, again = (load_file(each / "encoder.safetensors") for each in (whole, run))
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_memory_that_is_too_small_for_the_later_views_is_known_before_the_first_step(
    digit_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides, forward = sides_of_steps(monkeypatch), Network.forward

    def short_of_memory(network, views):
        if network.training and torch.is_grad_enabled() and views.shape[-1] == 16:
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
        return forward(network, views)

    monkeypatch.setattr(Network, "forward", short_of_memory)
    with pytest.raises(RunStopped, match="--micro-batch"):
        millionway.pretrain(digit_folder, tmp_path / "run", **SETTINGS)
    assert sides == []


def test_more_epochs_are_of_the_full_side(digit_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = millionway.pretrain(digit_folder, tmp_path / "run", **SETTINGS)
    sides = sides_of_steps(monkeypatch)
    millionway.pretrain(out=run, resume=True, epochs=3)
    assert sides == 6 * [16]
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "step"] == list(
        range(1, 19)
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"first_size": 20}, "--first-size 20 is larger than --image-size 16, which a run ends with"),
        ({"first_size": 4}, "--first-size must be at least 8 pixels, not 4"),
        ({"first_size": "half"}, "--first-size"),
        ({"encoder": "vit_tiny_patch16_224", "image_size": 32, "first_size": 24}, "does not take images of 24 px"),
        ({"first_size": 12, "encoder_precision": "bfloat16"}, "needs images of at least 16 px on a CPU, not 12"),
    ],
)
def test_sides_that_cannot_be_are_refused_before_any_work(
    digit_folder: Path, tmp_path: Path, settings: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        millionway.pretrain(digit_folder, tmp_path / "run", **{**SETTINGS, "encoder_precision": None, **settings})
    assert not (tmp_path / "run" / "config.json").exists()

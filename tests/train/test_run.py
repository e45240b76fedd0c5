"""A run as a whole, in this process."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import millionway
from millionway.cli import main
from millionway.model.encoder import EncoderSpec, build_encoder
from millionway.model.encoder_file import save_encoder
from millionway.reporting import words
from millionway.reporting.metrics import read_metrics
from millionway.reporting.verdict import FLAT, Verdict
from millionway.seals import read_json, write_json
from millionway.settings.checks import flag
from millionway.settings.pretrain import Pretrain, with_settings
from millionway.settings.stored import run_settings, to_json
from millionway.train import monitor, setup
from millionway.train.stops import RunStopped

SETTINGS = {"epochs": 2, "batch_size": 16, "image_size": 16, "threads": 1, "hardest": 2, "save_every": 1, "keep": 99}


def rows(run: Path, step: int) -> dict[str, torch.Tensor]:
    files = (run / "checkpoints" / f"step_{step:08d}" / "classifier").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_rows_in_half_the_memory_go_on_to_the_same_bits(optimizer: str, digit_folder: Path, tmp_path: Path) -> None:
    options = {"storage": "bfloat16", "row_norm": 1.0, "optimizer": optimizer}
    run = millionway.pretrain(digit_folder, tmp_path / "run", **options, **SETTINGS)
    first, last = rows(run, 0), rows(run, 14)
    assert {tensor.dtype for name, tensor in last.items() if tensor.is_floating_point()} == {torch.bfloat16}
    assert not first["rows"].equal(last["rows"])
    assert torch.allclose(first["rows"].float().norm(dim=1), torch.ones(120), atol=4e-3)

    for step in range(8, 15):
        shutil.rmtree(run / "checkpoints" / f"step_{step:08d}")
    millionway.pretrain(out=run, resume=True)
    again = rows(run, 14)
    assert all(again[name].equal(last[name]) for name in last)


def test_weights_that_are_not_finite_are_refused_before_any_work(digit_folder: Path, tmp_path: Path) -> None:
    encoder = build_encoder(EncoderSpec("narrow-resnet", "small", 16, (0.5,) * 3, (0.5,) * 3), seed=0)
    next(encoder.parameters()).data[0, 0, 0, 0] = torch.nan
    save_encoder(encoder, tmp_path / "broken.safetensors")
    with pytest.raises(
        ValueError, match=r"--init-from .*broken.safetensors: it has weights that are not finite .*: \w+"
    ):
        millionway.pretrain(digit_folder, tmp_path / "run", init_from=tmp_path / "broken.safetensors", **SETTINGS)
    assert not (tmp_path / "run").exists()


def test_a_restart_removes_nobody_elses_files(digit_folder: Path, tmp_path: Path, monkeypatch) -> None:
    """torchrun starts the same command again also after it was refused."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    out = tmp_path / "results"
    (out / "thesis").mkdir(parents=True)
    for name in ("thesis.tex", "train.log"):
        (out / name).write_text("mine")
    with pytest.raises(ValueError, match="exists already"):
        millionway.pretrain(digit_folder, out, **SETTINGS)
    assert sorted(path.name for path in out.iterdir()) == ["thesis", "thesis.tex", "train.log"]


def test_a_restart_does_not_go_on_with_another_run(digit_folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    flags = [word for name, value in SETTINGS.items() for word in (flag(name), str(value))]
    command = ["pretrain", "--data", str(digit_folder), "--out", str(tmp_path / "run"), *flags]
    assert main(command) == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main(command) == 0  # the same run: it is finished
    assert main([*command, "--lr", "0.1"]) == 2
    assert "--lr was 0.03, now 0.1" in capsys.readouterr().err


def test_the_short_name_of_an_encoder_is_the_same_encoder(tmp_path: Path) -> None:
    stored = with_settings(Pretrain(str(tmp_path / "gone"), tmp_path), encoder="torchvision/resnet18", epochs=3)
    (tmp_path / "config.json").write_text(to_json(stored))
    (tmp_path / "train.log").touch()
    with pytest.raises(ValueError, match=r"gone: no such folder"):  # which comes after the settings
        millionway.pretrain(out=tmp_path, resume=True, encoder="resnet18")
    with pytest.raises(ValueError, match="--encoder was torchvision/resnet18, now torchvision/resnet34"):
        millionway.pretrain(out=tmp_path, resume=True, encoder="resnet34")


def test_images_that_cannot_ask_are_refused_before_any_work(digit_folder: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, path in enumerate(sorted(digit_folder.rglob("*.png"))):
        shutil.copy(path, flat / f"{number}.png")
    fewer = tmp_path / "fewer"
    shutil.copytree(digit_folder, fewer)
    shutil.rmtree(fewer / "3")
    questions = [
        (digit_folder, "nowhere", "nowhere"),
        (digit_folder, flat, "flat has no labels"),
        (flat, digit_folder, "flat has no labels"),
        (fewer, digit_folder, r"1 of its classes have no training image \(3\)"),
    ]
    for data, asks, message in questions:
        with pytest.raises(ValueError, match=message):
            millionway.pretrain(data, tmp_path / "run", test_data=str(asks), **SETTINGS)
        assert not (tmp_path / "run").exists()


def test_images_that_have_moved_are_found_later(digit_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(digit_folder, tmp_path / "before")
    run = millionway.pretrain(tmp_path / "before", tmp_path / "run", **SETTINGS)
    (tmp_path / "before").rename(tmp_path / "after")
    millionway.pretrain(tmp_path / "after", run, resume=True)
    assert millionway.evaluate("knn", run)["knn_20"] > 0.2
    assert not run_settings(run).resume


def test_rows_that_overflow_are_a_divergence(digit_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match=r"not finite .* at step \d+, epoch \d.*lower --lr"):
        millionway.pretrain(digit_folder, tmp_path / "run", **{**SETTINGS, "row_lr": 1e30, "epochs": 9})


def test_what_the_encoder_computes_in_stays(digit_folder: Path, tmp_path: Path, monkeypatch, caplog) -> None:
    """Chosen by the processor, kept by the run; and said where it will be slow."""
    runs = {}
    for has_it in (True, False):
        monkeypatch.setattr(setup, "has_bfloat16", lambda device, has_it=has_it: has_it)
        run = millionway.pretrain(digit_folder, tmp_path / str(has_it), **SETTINGS)
        precision = run_settings(run).model.encoder_precision
        assert precision == ("bfloat16" if has_it else "float32")
        runs[precision] = load_file(run / "encoder.safetensors")
    assert any(not runs["bfloat16"][name].equal(tensor) for name, tensor in runs["float32"].items())
    assert {tensor.dtype for tensor in runs["bfloat16"].values() if tensor.is_floating_point()} == {torch.float32}

    last = rows(tmp_path / "True", 14)
    for step in range(8, 15):
        shutil.rmtree(tmp_path / "True" / "checkpoints" / f"step_{step:08d}")
    assert "no instructions" not in caplog.text
    millionway.pretrain(out=tmp_path / "True", resume=True)  # on the processor without
    assert all(tensor.equal(last[name]) for name, tensor in rows(tmp_path / "True", 14).items())
    assert "--encoder-precision bfloat16: there are no instructions for it here" in caplog.text


def test_a_run_from_before_they_could_be_chosen_has_float32_and_rows_that_see_all_views(
    digit_folder: Path, tmp_path: Path
) -> None:
    run = millionway.pretrain(digit_folder, tmp_path / "run", **SETTINGS)
    stored = read_json(run / "config.json", "")
    del stored["model"]["encoder_precision"], stored["classifier"]["row_views"], stored["images"]["first_size"]
    write_json(run / "config.json", stored)
    assert run_settings(run).model.encoder_precision == "float32"
    assert run_settings(run).classifier.row_views == 2
    assert run_settings(run).images.first_size == "full"


def test_knn_is_in_the_first_the_last_and_some_evaluations(digit_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    millionway.pretrain(digit_folder, run, **SETTINGS | {"epochs": 5})
    evaluations = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "evaluation"]
    assert [line["epoch"] for line in evaluations] == [0, 1, 2, 3, 4, 5]
    assert [line["epoch"] for line in evaluations if "knn_20" in line] == [0, 2, 4, 5]
    assert "random_knn_20" in evaluations[0] and all("instance_top1" in line for line in evaluations)
    assert f"label of {evaluations[-1]['knn_20']:.1%} of images" in (run / "report.html").read_text()


def test_a_run_that_ends_early_has_knn_at_its_end(digit_folder: Path, tmp_path: Path, monkeypatch) -> None:
    said = lambda lines, epochs: Verdict(FLAT if lines[-1]["epoch"] >= 2 else "learning", "")
    monkeypatch.setattr(monitor, "verdict", said)
    run, settings = tmp_path / "run", SETTINGS | {"epochs": 9, "eval_every": 1, "knn_every": 9}
    millionway.pretrain(digit_folder, run, stop_when_flat=True, **settings)
    evaluations = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "evaluation"]
    assert [(line["epoch"], "knn_20" in line) for line in evaluations] == [(0, True), (1, False), (2, True)]


def test_the_report_says_after_which_epoch_knn_was_scored() -> None:
    scored, later = {"epoch": 4, "knn_20": 0.5}, {"epoch": 6}
    assert list(words._last_score([scored, later], "knn_20")) == [(0.5, " after epoch 4", scored)]
    assert list(words._last_score([later, scored], "knn_20")) == [(0.5, "", scored)]
    assert list(words._last_score([later], "knn_20")) == []


def test_on_a_cpu_nobody_asks_for_a_driver(digit_folder: Path, tmp_path: Path, monkeypatch) -> None:
    """One that hangs, or takes memory of a GPU that somebody else uses, is left alone."""

    def asked(*_: object, **__: object) -> None:
        raise AssertionError("CUDA was asked")

    for name in ("is_available", "device_count", "current_device", "get_device_name", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, asked)
    run = millionway.pretrain(digit_folder, tmp_path / "run", device="cpu", **SETTINGS)
    assert millionway.evaluate("knn", run, digit_folder, device="cpu")["knn_20"] > 0

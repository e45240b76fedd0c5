"""The verbs, and what bad input gets: a clear message, an exit code, and nothing left behind."""

import fcntl
import json
import os
import shutil
import subprocess
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image

import millionway
from millionway.cli import VERBS, main
from millionway.data.manifest import Manifest

TINY = ["--epochs", "1", "--batch-size", "40", "--image-size", "16", "--eval-every", "1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory, digit_folder):
    """A finished run on 120 digits."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    assert main(["pretrain", "--data", str(digit_folder), "--out", str(out), *TINY]) == 0
    return out


def refused(capsys, *args: str, code: int = 2) -> str:
    """The message of a command that must fail."""
    assert main([str(arg) for arg in args]) == code
    return capsys.readouterr().err


# --- what works -------------------------------------------------------------------------------------------------------


def test_run_folder_holds_what_it_should(run) -> None:
    names = {path.name for path in run.iterdir()}
    assert names == {
        *("config.json", "environment.json", "manifest.arrow", "metrics.jsonl", "train.log", "tensorboard"),
        *("checkpoints", "evaluation", "encoder.safetensors", "report.html", "snapshots"),
    }
    kinds = [json.loads(line)["kind"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["evaluation", "step", "step", "epoch", "evaluation"]
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    health = {"instance_top1", "instance_top5", "effective_rank", "positive_cosine", "hardest_negative_cosine"}
    assert health | {"knn_20", "knn_200", "random_knn_20", "random_knn_200"} <= set(first)
    assert "120 images, so a 120-way classifier" in (run / "train.log").read_text()
    assert "--stem small" in (run / "train.log").read_text()
    assert json.loads((run / "environment.json").read_text())["threads"] >= 1


@pytest.mark.parametrize("protocol", ["knn", "linear"])
def test_evaluate(run, digit_folder, protocol: str, capsys) -> None:
    assert main(["evaluate", protocol, "--run", str(run), "--data", str(digit_folder)]) == 0
    result = json.loads((run / "evaluation" / f"{protocol}.json").read_text())
    assert result["protocol"] == protocol and all(0 < value <= 1 for value in result["numbers"].values())
    assert result["settings"]["num_bank"] + result["settings"]["num_queries"] == 120
    assert protocol in capsys.readouterr().out
    others = {"chance": result["settings"]["chance"], "untrained": result["untrained"]}
    assert millionway.evaluate(protocol, run) == {**result["numbers"], **others}


def test_embed(run, digit_folder, tmp_path) -> None:
    for name in ("f.parquet", "f.npy"):
        assert main(["embed", "--run", str(run), "--data", str(digit_folder), "--out", str(tmp_path / name)]) == 0
    table = pyarrow.parquet.read_table(tmp_path / "f.parquet")
    features = np.load(tmp_path / "f.npy")
    assert features.shape == (120, 256) and features.dtype == np.float32
    assert (np.stack(table["feature"].to_numpy()) == features).all()
    assert table["key"].to_pylist() == json.loads((tmp_path / "f.keys.json").read_text())
    assert table["label"][0].as_py() == "0"
    encoder = millionway.load_encoder(run)
    key = table["key"][5].as_py()
    image = torch.from_numpy(np.array(Image.open(digit_folder / key).convert("RGB"))).permute(2, 0, 1)[None] / 255
    with torch.no_grad():
        assert np.allclose(encoder(image).numpy(), features[5], atol=1e-4)


def test_export(run, tmp_path, capsys) -> None:
    assert main(["export", "--run", str(run), "--out", str(tmp_path / "e.pt"), "--format", "torch"]) == 0
    snippet = capsys.readouterr().out.split("To load it:\n")[1]
    loaded: dict[str, Any] = {}
    exec(snippet, loaded)
    encoder, images = millionway.load_encoder(run), torch.rand(2, 3, 16, 16)
    mean, std = (torch.tensor(values)[:, None, None] for values in (encoder.spec.mean, encoder.spec.std))
    with torch.no_grad():
        torch.testing.assert_close(loaded["model"].eval()((images - mean) / std), encoder(images))
    state = torch.load(tmp_path / "e.pt", weights_only=True)
    assert set(state) == set(millionway.load_encoder(run).backbone.state_dict())
    assert json.loads((tmp_path / "e.json").read_text())["name"] == "narrow-resnet"
    assert main(["export", "--run", str(run), "--out", str(tmp_path / "e.safetensors")]) == 0
    assert (tmp_path / "e.safetensors").read_bytes() == (run / "encoder.safetensors").read_bytes()
    assert "exists already" in refused(capsys, "export", "--run", run, "--out", tmp_path / "e.pt")


def test_index_and_its_list(digit_folder, tmp_path, capsys) -> None:
    listed = tmp_path / "manifest.arrow"
    assert main(["index", str(digit_folder), "--out", str(listed)]) == 0
    assert "120 images, 0 unreadable" in capsys.readouterr().out
    out = tmp_path / "run"
    args = ["--data", str(digit_folder), "--out", str(out), "--manifest", str(listed), *TINY]
    assert main(["pretrain", *args, "--labels", "none"]) == 0
    assert (out / "manifest.arrow").read_bytes() == listed.read_bytes()
    assert "knn_20" not in (out / "metrics.jsonl").read_text()


def test_weights_of_another_run(run, digit_folder, tmp_path, capsys) -> None:
    source = run / "encoder.safetensors"
    args = ["pretrain", "--data", str(digit_folder), "--init-from", str(source), *TINY]
    assert main([*args, "--out", str(tmp_path / "a")]) == 0
    first = [
        json.loads((each / "metrics.jsonl").read_text().splitlines()[-1 * (each == run)])
        for each in (run, tmp_path / "a")
    ]
    assert first[0]["knn_200"] == pytest.approx(first[1]["start_knn_200"])
    message = refused(capsys, *args, "--out", tmp_path / "b", "--encoder", "resnet18")
    assert "narrow-resnet" in message and "resnet18" in message and not (tmp_path / "b").exists()


def test_sampling_heads_and_priors_run(digit_folder, tmp_path) -> None:
    grid = [
        ["--head", "linear", "--prior", "fixed-bn", "--hardest", "5"],
        ["--head", "none", "--prior", "random", "--classes-per-step", "full"],
        ["--classes-per-step", "16", "--smoothing", "0", "--prior", "batch-bn"],
    ]
    for number, extra in enumerate(grid):
        args = ["--data", str(digit_folder), "--out", str(tmp_path / str(number)), *TINY, *extra]
        assert main(["pretrain", *args]) == 0


def test_help_is_there_for_every_verb(capsys) -> None:
    assert main([]) == 0 and main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in VERBS)
    for verb in set(VERBS) - {"presets"}:
        assert main([verb, "--help"]) == 0
        capsys.readouterr()
    assert main(["pretrain", "--help"]) == 0
    short = capsys.readouterr().out
    assert main(["pretrain", "--help-all"]) == 0
    long = capsys.readouterr().out
    assert "--epochs" in short and "--temperature" not in short and "--temperature" in long
    assert main(["presets"]) == 0
    assert "imagenet21k" in capsys.readouterr().out
    assert main(["--version"]) == 0


# --- bad input --------------------------------------------------------------------------------------------------------


def test_bad_words(capsys, tmp_path, run) -> None:
    assert "Did you mean 'pretrain'" in refused(capsys, "pretran")
    twice = refused(capsys, "pretrain", "--dta", tmp_path, "--out", tmp_path / "x", "--epoch=3", "--image_size", 32)
    assert "Did you mean '--data'" in twice and "Did you mean '--epochs'" in twice and "image_size" not in twice
    assert "Did you mean '--data'" in refused(capsys, "evaluate", "knn", "--dat", "x", "--no-cache")
    assert "Did you mean 'digits'" in refused(capsys, "pretrain", "--preset", "digit", "--out", tmp_path / "x")
    args = ("pretrain", "--data", "digits", "--out", tmp_path / "x")
    assert "resnet50" in refused(capsys, *args, "--encoder", "resnet5O")
    assert "--temperature" in refused(capsys, *args, "--temperature", "0")
    sampled = refused(capsys, *args, "--classes-per-step", "1796", "--smoothing", "0", "--batch-size", "64")
    assert "--classes-per-step 1796: with the batch's own 64 they are more than there are, 1797" in sampled
    refused(capsys, "pretrain", "--out", tmp_path / "x")
    refused(capsys, *args, "--epohcs", "3")
    assert "no such protocol" in refused(capsys, "evaluate", "nn", "--run", run)
    assert ".parquet or .npy" in refused(capsys, "embed", "--run", run, "--data", "digits", "--out", tmp_path / "x.csv")
    assert "--device" in refused(capsys, *args, "--device", "cuda") or torch.cuda.is_available()
    assert not (tmp_path / "x").exists()


def test_bad_data(capsys, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "notes.txt").write_text("hello")
    (tmp_path / "one").mkdir()
    Image.new("RGB", (20, 20)).save(tmp_path / "one" / "a.png")
    out = ("--out", tmp_path / "run")
    assert "no such folder" in refused(capsys, "pretrain", "--data", tmp_path / "missing", *out)
    assert "the folder is empty" in refused(capsys, "pretrain", "--data", tmp_path / "empty", *out)
    assert "no image found" in refused(capsys, "pretrain", "--data", tmp_path / "text", *out)
    assert "at least 2" in refused(capsys, "pretrain", "--data", tmp_path / "one", *out)
    assert not (tmp_path / "run").exists()


def test_batch_larger_than_the_data(capsys, digit_folder, tmp_path) -> None:
    args = ("pretrain", "--data", digit_folder, "--out", tmp_path / "run", "--batch-size", "121")
    assert "--batch-size 120 or less" in refused(capsys, *args)
    assert not (tmp_path / "run").exists()


def test_too_many_unreadable_images(capsys, digit_folder, tmp_path) -> None:
    photos = tmp_path / "photos"
    shutil.copytree(digit_folder, photos)
    names = sorted(photos.rglob("*.png"))
    names[7].write_bytes(b"")
    names[30].write_bytes(names[30].read_bytes()[:60])
    args = ["pretrain", "--data", str(photos), "--out", str(tmp_path / "run"), *TINY]
    message = refused(capsys, *args)
    assert "2 of 120 images cannot be read" in message and "--max-unreadable 0.02" in message
    assert not (tmp_path / "run").exists()
    assert main([*args, "--max-unreadable", "0.02"]) == 0
    assert "unreadable: " in (tmp_path / "run" / "train.log").read_text()
    manifest = Manifest.load(tmp_path / "run" / "manifest.arrow")
    assert len(manifest) == 120 and np.flatnonzero(~manifest.readable).tolist() == [7, 30]


def test_existing_or_unwritable_out(capsys, digit_folder, run, tmp_path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    args = ("pretrain", "--data", digit_folder, *TINY)
    assert "--resume" in refused(capsys, *args, "--out", run)
    assert (run / "metrics.jsonl").read_bytes() == before
    (tmp_path / "file").write_text("x")
    assert "cannot be written" in refused(capsys, *args, "--out", tmp_path / "file" / "run")
    (tmp_path / "empty").mkdir()
    assert main([str(arg) for arg in (*args, "--out", tmp_path / "empty")]) == 0


def test_resume_refuses_what_is_not_the_same_run(capsys, digit_folder, tmp_path) -> None:
    photos, out = tmp_path / "photos", tmp_path / "run"
    shutil.copytree(digit_folder, photos)
    assert "no run in" in refused(capsys, "pretrain", "--resume", "--out", out)
    with pytest.raises(ValueError, match="resume needs out"):
        millionway.pretrain(str(photos), resume=True)
    assert main(["pretrain", "--data", str(photos), "--out", str(out), *TINY]) == 0
    again = ("pretrain", "--resume", "--out", out)
    assert "--lr was" in refused(capsys, *again, "--lr", "0.5")
    before = (out / "metrics.jsonl").read_bytes()
    assert main([str(arg) for arg in (*again, "--keep", "1")]) == 0  # done already: nothing to do
    assert (out / "metrics.jsonl").read_bytes() == before
    gone = sorted(photos.rglob("*.png"))[3]
    gone.unlink()
    Image.new("RGB", (16, 16)).save(photos / "new one.png")
    message = refused(capsys, *again)
    assert "1 came (new one.png)" in message and f"1 went ({gone.parent.name}/{gone.name})" in message
    (out / "config.json").write_text("{")
    assert "cannot be read" in refused(capsys, *again)


def test_a_run_in_use_is_refused(capsys, run) -> None:
    with open(run / "train.log", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "is in use" in refused(capsys, "pretrain", "--resume", "--out", run)


def test_nan_stops_and_names_the_step(capsys, digit_folder, tmp_path) -> None:
    out = tmp_path / "run"
    args = ("pretrain", "--data", digit_folder, "--out", out, *TINY, "--epochs", "3", "--lr", "1e25")
    message = refused(capsys, *args, code=1)
    assert "not finite" in message and "at step " in message and "lower --lr" in message
    assert str(out / "checkpoints" / "step_0000000") in message


def test_evaluate_without_labels(capsys, run, tmp_path) -> None:
    for index in range(3):
        Image.new("RGB", (16, 16), (index, 0, 0)).save(tmp_path / f"{index}.png")
    assert "has no labels" in refused(capsys, "evaluate", "knn", "--run", run, "--data", tmp_path)
    assert "no such file" in refused(capsys, "evaluate", "knn", "--run", tmp_path, "--data", "digits")
    assert "not a run folder" in refused(capsys, "report", "--run", tmp_path)


@pytest.mark.root
def test_full_disk_during_a_run(capsys, digit_folder, disk_of) -> None:
    disk = disk_of("24m")
    out = disk / "run"
    args = ("pretrain", "--data", digit_folder, "--out", out, *TINY, "--epochs", "4", "--keep", "9")
    message = refused(capsys, *args, code=1)
    assert "no space left" in message and "newest complete checkpoint is" in message and "--resume" in message
    left = sorted((out / "checkpoints").glob("step_*"))
    assert left and str(left[-1]) in message and not list((out / "checkpoints").glob(".step*"))
    os.truncate(out / "train.log", 0)
    subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
    assert main(["pretrain", "--resume", "--out", str(out)]) == 0
    assert (out / "report.html").is_file()


def test_every_kind_of_picture_and_name_trains(tmp_path) -> None:
    """All that decodes takes part, whatever it is and is called; the rest keeps its number and is passed over."""
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 255, (40, 60, 3), dtype=np.uint8))
    photos = tmp_path / "my photos"
    photos.mkdir()
    noise.convert("CMYK").save(photos / "cmyk.jpg")
    noise.convert("LA").save(photos / "gray alpha.png")
    Image.fromarray(rng.integers(0, 65535, (30, 30), dtype=np.uint16)).save(photos / "16-bit.png")
    noise.save(photos / "animated.gif", save_all=True, append_images=[noise.rotate(90)])
    exif = Image.Exif()
    exif[0x0112] = 6
    noise.save(photos / "rotated.jpg", exif=exif)
    Image.new("RGB", (1, 1)).save(photos / "one pixel.png")
    noise.save(photos / "línea\nnueva.png")
    noise.resize((900, 20)).save(photos / "long.webp")
    Image.new("1", (20_000, 10_000)).save(photos / "200 megapixels.png")
    (photos / "empty.jpg").write_bytes(b"")
    os.mkfifo(photos / "pipe.jpg")
    (photos / "cut.jpg").write_bytes((photos / "cmyk.jpg").read_bytes()[:300])
    out = tmp_path / "[/x] run"
    args = ["pretrain", "--data", str(photos), "--out", str(out), "--epochs", "2", "--batch-size", "4"]
    assert main([*args, "--image-size", "32", "--max-unreadable", "0.34"]) == 0
    manifest = Manifest.load(out / "manifest.arrow")
    assert set(manifest.problems) == {"200 megapixels.png", "empty.jpg", "cut.jpg", "pipe.jpg"} and len(manifest) == 12
    assert "too many pixels" in (out / "train.log").read_text()


def test_what_can_be_refused_early_is(capsys, tmp_path, digit_folder, run, monkeypatch) -> None:
    """Before any image is decoded."""
    monkeypatch.setattr("millionway.data.indexing._examine", None)
    args = ("pretrain", "--data", digit_folder, "--out", tmp_path / "x")
    assert "--batch-size" in refused(capsys, *args, "--batch-size", "500")
    assert "at least 2" in refused(capsys, *args, "--batch-size", "1")
    assert "--hardest" in refused(capsys, *args, "--hardest", "120")
    assert "px" in refused(capsys, *args, "--encoder", "vit_b_16", "--image-size", "32")
    assert "--init-from" in refused(capsys, *args, "--encoder", "resnet18", "--init-from", run)
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_demo_beats_the_random_encoder(tmp_path, capsys) -> None:
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    printed = capsys.readouterr().out
    first = json.loads((tmp_path / "demo" / "metrics.jsonl").read_text().splitlines()[0])
    trained = json.loads((tmp_path / "demo" / "evaluation" / "knn.json").read_text())["numbers"]["knn_200"]
    assert trained - max(first["random_knn_200"], first["knn_200"]) >= 0.08
    assert f"{trained:.1%}" in printed and str(tmp_path / "demo" / "report.html") in printed

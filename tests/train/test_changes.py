"""Images come, go and change their names while a run is away."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import millionway
from millionway.data.indexing import build_manifest, update_manifest
from millionway.data.kinds.choose import open_source
from millionway.data.manifest import REMOVED, Manifest
from millionway.model.classifier import InstanceClassifier
from millionway.reporting.metrics import read_metrics
from millionway.train import changes, checkpoint

SETTINGS = {"epochs": 3, "batch_size": 16, "image_size": 16, "threads": 1, "hardest": 2, "save_every": 1, "keep": 99}


def picture(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).resize((16, 16)).save(path)


@pytest.fixture
def photos(tmp_path: Path, digit_pixels: np.ndarray) -> Path:
    for number in range(60):
        picture(tmp_path / "photos" / f"{number % 3}" / f"{number:03d}.png", digit_pixels[number])
    return tmp_path / "photos"


def change(photos: Path, digit_pixels: np.ndarray) -> None:
    """Two removed, one renamed, one changed, four new; so two take free numbers and two come at the end."""
    names = sorted(photos.rglob("*.png"))
    names[4].unlink()
    names[20].unlink()
    names[30].rename(photos / "2" / "zzz.png")
    picture(names[40], digit_pixels[200])
    for number in range(4):
        picture(photos / "0" / f"a-new-{number}.png", digit_pixels[100 + number])


def rows_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted((run / "checkpoints" / f"step_{step:08d}" / "classifier").glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def test_the_list_keeps_everybodys_number(photos: Path, digit_pixels: np.ndarray) -> None:
    old = build_manifest(open_source(str(photos)), 2)
    change(photos, digit_pixels)
    found = update_manifest(old, open_source(str(photos)), 2)
    new = found.manifest
    assert str(found) == "5 new or changed, 2 removed, 1 renamed"
    assert len(new) == 62 and found.new_ids.tolist() == [4, 20, 40, 60, 61]
    for row in set(range(60)) - {4, 20, 30, 40}:
        assert new.keys[row] == old.keys[row] and new.column("content_hash")[row] == old.column("content_hash")[row]
    assert new.keys[30] == "2/zzz.png" and new.keys[4].startswith("0/a-new") and new.keys[40] == old.keys[40]
    assert new.column("content_hash")[40] != old.column("content_hash")[40]
    assert new.fingerprint != old.fingerprint and new.readable.all()

    for number in range(4):
        (photos / "0" / f"a-new-{number}.png").unlink()
    fewer = update_manifest(new, open_source(str(photos)), 2)
    assert fewer.num_removed == 4 and len(fewer.manifest) == 62 and (~fewer.manifest.readable).sum() == 4
    assert fewer.manifest.table["problem"][4].as_py() == REMOVED and not fewer.manifest.problems
    assert fewer.manifest.fingerprint != new.fingerprint
    again = update_manifest(fewer.manifest, open_source(str(photos)), 2)
    assert again.manifest.fingerprint == fewer.manifest.fingerprint and len(again.new_ids) == 0


def test_a_run_goes_on_with_other_images(photos: Path, digit_pixels: np.ndarray, tmp_path: Path, capsys) -> None:
    run = millionway.pretrain(photos, tmp_path / "run", **SETTINGS)  # three steps an epoch
    for folder in (run / "checkpoints").glob("step_0000000[6789]"):
        shutil.rmtree(folder)  # as if it had been stopped after step 5, in the second epoch
    stopped = rows_of(run, 5)
    encoder = load_file(run / "checkpoints" / "step_00000005" / "model.safetensors")
    change(photos, digit_pixels)
    with pytest.raises(ValueError, match=r"the images of .* are not those of"):
        millionway.pretrain(out=run, resume=True)
    millionway.pretrain(out=run, resume=True, data_changed=True)

    taken = rows_of(run, 3)  # the second epoch begins again
    assert len(taken["rows"]) == 62
    stayed = torch.tensor(sorted(set(range(60)) - {4, 20, 40}))
    assert torch.equal(taken["rows"][stayed], stopped["rows"][stayed])
    assert torch.equal(taken["momentum"][stayed], stopped["momentum"][stayed])
    new = torch.tensor([4, 20, 40, 60, 61])
    assert bool((taken["momentum"][new] == 0).all())
    lengths = taken["rows"].norm(dim=1)
    assert torch.allclose(lengths[new], lengths[stayed].mean().expand(5), rtol=1e-4)
    assert not torch.isclose(taken["rows"][4], stopped["rows"][4]).all()
    same = load_file(run / "checkpoints" / "step_00000003" / "model.safetensors")
    assert all(torch.equal(same[name], encoder[name]) for name in encoder)
    manifest = Manifest.load(run / "manifest.arrow")
    assert len(manifest) == 62 and not (run / changes.CHANGED).exists()
    assert "5 new or changed, 2 removed, 1 renamed" in (run / "train.log").read_text()
    assert checkpoint.complete(run / "checkpoints")[0].name == "step_00000009"
    millionway.pretrain(out=run, resume=True)  # from now on it is an ordinary run
    assert "same as before" in _log_after(run, lambda: millionway.pretrain(out=run, resume=True, data_changed=True))


def _log_after(run: Path, work) -> str:
    before = len((run / "train.log").read_text())
    work()
    return (run / "train.log").read_text()[before:]


def test_removed_images_leave_dead_rows(photos: Path, digit_pixels: np.ndarray, tmp_path: Path) -> None:
    run = millionway.pretrain(photos, tmp_path / "run", **{**SETTINGS, "epochs": 2})
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    gone = sorted(photos.rglob("*.png"))[10]
    gone.unlink()
    before = rows_of(run, 5)
    millionway.pretrain(out=run, resume=True, data_changed=True)
    after = rows_of(run, 6)
    assert [line["epoch"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "epoch"] == [1, 2]
    assert torch.equal(after["rows"][10], before["rows"][10])  # nobody moved it
    assert not bool((after["hardest"] == 10).any())
    assert not torch.equal(after["rows"][11], before["rows"][11])


def test_an_interruption_while_taking_over_is_repaired(
    photos: Path, digit_pixels: np.ndarray, tmp_path: Path, monkeypatch
) -> None:
    run = millionway.pretrain(photos, tmp_path / "run", **SETTINGS)
    shutil.rmtree(run / "checkpoints" / "step_00000009")
    change(photos, digit_pixels)

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save", cut)
    with pytest.raises(KeyboardInterrupt):
        millionway.pretrain(out=run, resume=True, data_changed=True)
    monkeypatch.undo()
    assert (run / changes.CHANGED).exists() and len(Manifest.load(run / "manifest.arrow")) == 60
    monkeypatch.setattr(changes, "accept_change", cut)
    with pytest.raises(KeyboardInterrupt):
        millionway.pretrain(out=run, resume=True, data_changed=True)
    monkeypatch.undo()
    assert len(Manifest.load(run / "manifest.arrow")) == 60  # the checkpoint is there, the list is not
    millionway.pretrain(out=run, resume=True)
    assert len(Manifest.load(run / "manifest.arrow")) == 62


def test_rows_move_between_classifiers() -> None:
    old, new = InstanceClassifier(10, 4, seed=1), InstanceClassifier(13, 4, seed=2)
    old.momentum.normal_()
    first = new.weight.clone()
    new.take_rows(old)
    assert torch.equal(new.weight[:10], old.weight) and torch.equal(new.momentum[:10], old.momentum)
    assert torch.equal(new.weight[10:], first[10:])


def test_bad_questions(photos: Path, digit_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--data-changed is for --resume"):
        millionway.pretrain(photos, tmp_path / "run", data_changed=True, **SETTINGS)
    run = millionway.pretrain(photos, tmp_path / "run", **{**SETTINGS, "epochs": 1})
    picture(tmp_path / "other" / "x.png", np.zeros((8, 8), np.uint8))
    with pytest.raises(ValueError, match="another data set"):
        millionway.pretrain(tmp_path / "other", run, resume=True, data_changed=True)
    sorted(photos.rglob("*.png"))[10].unlink()
    some = millionway.pretrain(photos, tmp_path / "some", max_images=40, **{**SETTINGS, "epochs": 1})
    with pytest.raises(ValueError, match="--max-images would choose other images"):
        millionway.pretrain(out=some, resume=True, data_changed=True)


def test_numbers_of_earlier_epochs_stay_when_there_are_fewer_steps(photos: Path, tmp_path: Path) -> None:
    run = millionway.pretrain(photos, tmp_path / "run", **{**SETTINGS, "epochs": 4})  # three steps an epoch
    shutil.rmtree(run / "checkpoints" / "step_00000012")
    earlier = [line for line in read_metrics(run / "metrics.jsonl") if line["epoch"] <= 3]
    for path in sorted(photos.rglob("*.png"))[::2]:
        path.unlink()
    millionway.pretrain(out=run, resume=True, data_changed=True)  # one step an epoch
    lines = read_metrics(run / "metrics.jsonl")
    assert lines[: len(earlier)] == earlier
    assert [line["epoch"] for line in lines if line["kind"] == "epoch"] == [1, 2, 3, 4]

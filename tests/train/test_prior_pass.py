"""The pass over all images before the first step, in a real run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

import millionway
from millionway.reporting.metrics import read_metrics
from millionway.train import loop as pretrain

SETTINGS = {"epochs": 1, "batch_size": 16, "image_size": 16, "eval_every": 1, "threads": 1}


class PowerCut(RuntimeError):
    pass


def test_a_pass_that_is_cut_goes_on_where_it_was(digit_folder: Path, tmp_path: Path, monkeypatch) -> None:
    undisturbed = millionway.pretrain(digit_folder, tmp_path / "undisturbed", keep=9, **SETTINGS)
    whole = pretrain.write_prior
    seen = []

    def cut(mode, network, classifier, batches, row_norm, progress) -> float:
        def some() -> Iterator:
            for number, batch in enumerate(batches):
                if number == 5:
                    raise PowerCut
                yield batch

        return whole(mode, network, classifier, some(), row_norm, progress)

    def counting(mode, network, classifier, batches, row_norm, progress) -> float:
        seen.append(progress.batches)
        return whole(mode, network, classifier, batches, row_norm, progress)

    monkeypatch.setattr(pretrain, "PRIOR_SAVE_SECONDS", -1)
    monkeypatch.setattr(pretrain, "write_prior", cut)
    with pytest.raises(PowerCut):
        millionway.pretrain(digit_folder, tmp_path / "cut", keep=9, **SETTINGS)
    names = sorted(path.name for path in (tmp_path / "cut" / "checkpoints").glob("*_*"))
    assert names[0] == "prior_00000000" and names[-1] >= "prior_00000004"

    monkeypatch.setattr(pretrain, "write_prior", counting)
    again = millionway.pretrain(out=tmp_path / "cut", resume=True)
    assert seen[0] >= 4
    for name in ("encoder.safetensors", "checkpoints/step_00000000/model.safetensors"):
        one, other = load_file(undisturbed / name), load_file(again / name)
        assert all(one[key].equal(other[key]) for key in one)
    lines = [
        [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "evaluation"]
        for run in (undisturbed, again)
    ]
    assert lines[0] == lines[1] and "random_knn_200" in lines[0][0]


def test_encoders_without_batch_normalization_say_so(digit_folder: Path, tmp_path: Path) -> None:
    run = millionway.pretrain(
        digit_folder, tmp_path / "run", encoder="timm/convnext_atto", head="linear", **{**SETTINGS, "image_size": 32}
    )
    assert "no batch normalization" in (run / "train.log").read_text()


def test_some_images_and_other_queries(digit_folder: Path, tmp_path: Path) -> None:
    from millionway.data.manifest import Manifest

    runs = [
        millionway.pretrain(
            digit_folder, tmp_path / str(seed), max_images=64, test_data=str(digit_folder), seed=seed, **SETTINGS
        )
        for seed in (1, 2)
    ]
    first, second = (Manifest.load(run / "manifest.arrow") for run in runs)
    assert len(first) == 64 and list(first.keys) == list(second.keys)
    assert list(first.keys) == sorted(first.keys) and len({key[0] for key in first.keys}) > 5
    scores = millionway.evaluate("knn", runs[0])
    assert scores["knn_20"] > 0.5
    stored = (runs[0] / "evaluation" / "knn.json").read_text()
    assert '"num_bank": 64' in stored and '"num_queries": 120' in stored

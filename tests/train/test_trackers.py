"""--log-to: the same numbers elsewhere, and never a reason to stop."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import millionway

SHORT: dict[str, Any] = {"epochs": 1, "image_size": 16, "threads": 1, "log_every": 4}


def losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_what_is_not_installed_is_refused_before_anything_is_made(
    name: str, digit_folder, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=rf"--log-to {name}: it is not installed; pip install 'millionway\[{name}\]'"):
        millionway.pretrain(digit_folder, tmp_path / "run", log_to=name, **SHORT)
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore")  # theirs
def test_mlflow_gets_what_the_run_writes_also_when_it_goes_on(digit_folder, tmp_path, monkeypatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "numbers").as_uri())
    run = millionway.pretrain(digit_folder, tmp_path / "run", log_to="mlflow", **SHORT)
    run.resume(epochs=2)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("millionway")
    (there,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(there.info.run_id, "step/loss")
    assert {each.step: each.value for each in history} == pytest.approx(losses(run)) and len(history) > 3
    assert "evaluation/instance_top1" in there.data.metrics and there.info.status == "FINISHED"
    assert there.data.params["image_size"] == "16" and there.data.tags["folder"] == str(tmp_path / "run")


@pytest.mark.filterwarnings("ignore")
def test_a_tracker_that_fails_does_not_end_the_run(digit_folder, tmp_path, monkeypatch, caplog) -> None:
    pytest.importorskip("mlflow")
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "file" / "numbers").as_uri())
    run = millionway.pretrain(digit_folder, tmp_path / "run", log_to="mlflow", **SHORT)
    assert "the run goes on without it" in caplog.text and (run / "encoder.safetensors").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_gets_them_offline(digit_folder, tmp_path, monkeypatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run = millionway.pretrain(digit_folder, tmp_path / "run", log_to="wandb", **SHORT)
    (written,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert (run / "encoder.safetensors").exists() and b"step/loss" in written.read_bytes()

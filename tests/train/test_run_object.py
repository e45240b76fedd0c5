"""What Python gets back from a run."""

import os
from pathlib import Path

import torch

import millionway
from millionway.train.run_object import Run


def test_a_run_is_a_path_with_all_that_can_be_had_from_it(digit_folder: Path, tmp_path: Path) -> None:
    settings = {"epochs": 1, "batch_size": 40, "image_size": 16, "threads": 1}
    run = millionway.pretrain(digit_folder, tmp_path / "run", **settings)
    assert isinstance(run, Run) and isinstance(run, Path) and run == tmp_path / "run"
    assert (run / "config.json").is_file() and run.report.is_file() and os.path.isdir(run)
    with torch.no_grad():
        assert run.encoder()(torch.rand(2, 3, 16, 16)).shape == (2, 256)
    kinds = run.metrics["kind"].to_pylist()
    assert kinds.count("epoch") == 1 and len(run.metrics["loss"]) == len(kinds)
    assert run.evaluate("knn", cache=False) == millionway.evaluate("knn", run, cache=False)
    card = run._repr_html_()
    assert card is not None and "<b>run " in card and "120 " in card and "<script" not in card
    assert (run / "checkpoints")._repr_html_() is None
    longer = run.resume(epochs=2)
    assert longer == run and longer.metrics["kind"].to_pylist().count("epoch") == 2

"""The process of a cell: train, score, write the numbers."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from millionway.evaluation.protocols import evaluate
from millionway.files import write_whole
from millionway.reporting.metrics import read_metrics
from millionway.run_folder import ENVIRONMENT
from millionway.seals import read_json
from millionway.settings.evaluate import Evaluate
from millionway.settings.pretrain import FREE_ON_RESUME, with_settings
from millionway.settings.stored import first_settings
from millionway.studies.cells import short_name
from millionway.train.run import pretrain


def run_cell(run: Path, result: Path, settings: dict[str, Any]) -> None:
    """Train, score, write the numbers, and remove the run."""
    if (run / "config.json").exists():
        free = {name: value for name, value in settings.items() if name in FREE_ON_RESUME}
        pretrain(with_settings(first_settings(None, run), **free))
    else:
        shutil.rmtree(run, ignore_errors=True)
        given = {name: value for name, value in settings.items() if name != "preset"}
        pretrain(with_settings(first_settings(settings.get("preset"), None), **given, out=run))
    how = {
        "cache": False,
        "untrained": "no",
        "threads": settings.get("threads"),
        "device": settings.get("device", "auto"),
    }
    scores = {}
    for protocol in ("knn", "linear"):
        scores |= evaluate(Evaluate(protocol, run, seed=settings["seed"], **how))[protocol]
    lines = read_metrics(run / "metrics.jsonl")
    kept = ("epoch", "knn_20", "knn_200", "random_knn_200", "instance_top1", "effective_rank", "loss")
    curve = [
        {key: line[key] for key in kept if key in line}
        for line in lines
        if line["kind"] == "evaluation" and "knn_200" in line
    ]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    seconds = sum(line["seconds"] for line in epochs)
    numbers = {
        **scores,
        "instance_top1": curve[-1]["instance_top1"],
        "seconds": seconds,
        "hardest_share": sum(line["hardest_seconds"] for line in epochs) / seconds,
        "curve": curve,
        "settings": {k: short_name(v) if k in ("data", "test_data") else v for k, v in settings.items()},
        "environment": read_json(run / ENVIRONMENT),
    }
    write_whole(result, json.dumps(numbers, indent=1) + "\n")
    shutil.rmtree(run)


if __name__ == "__main__":
    _order = json.loads(sys.argv[1])
    run_cell(Path(_order["run"]), Path(_order["result"]), _order["settings"])

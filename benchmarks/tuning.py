"""The small presets' values: found with one seed on one data set.

    python benchmarks/tuning.py tune --data cifar10/train --test-data cifar10/test     # one seed, some settings
    python benchmarks/tuning.py run --data cifar10/train --test-data cifar10/test      # the choice, other seeds

Runs are the cells of a study, so those that are finished are not run again. `benchmarks/simclr.py` compares the
choice with SimCLR.
"""

import argparse
import json
from pathlib import Path

from presets import write_between_marks

from millionway.console import messages
from millionway.machine import num_cores
from millionway.studies.cells import Job, run_jobs
from millionway.studies.grids import cell

ROOT = Path(__file__).parent.parent
OUT = ROOT / "benchmarks" / "results" / "tuning"
IMAGES, BATCH_SIZE = 10_000, 256
SGD = {"optimizer": "sgd", "pairs": 0.0, "head": "linear"}
BASE = {"lr": 0.06, "temperature": 0.15, "row_norm": 1.0, "row_lr": 1.0, "prior": "batch-bn"}
CHANGES: list[dict] = [
    {},
    {"row_lr": 10.0},
    {"prior": "running-bn"},
    {"row_lr": 50.0},
    {"row_lr": 200.0},
    {"lr": 0.12, "row_lr": 50.0},
    {"temperature": 0.1, "row_lr": 50.0},
    {"lr": 0.24, "row_lr": 50.0},
    {"row_lr": 50.0, "batch_size": 64},
    {"row_lr": 10.0, "batch_size": 64},
    {"row_lr": 50.0, "batch_size": 128},
    {"lr": 0.03, "row_lr": 50.0, "batch_size": 64},
    {"row_lr": 10.0, "batch_size": 64, "temperature": 0.1},
    {"row_lr": 10.0, "batch_size": 64, "temperature": 0.2},
    {"row_lr": 10.0, "batch_size": 64, "head": "linear"},
    {"row_lr": 10.0, "batch_size": 32},
    {"row_lr": 50.0, "batch_size": 64, "temperature": 0.1},
    {"row_lr": 10.0, "batch_size": 64, "temperature": 0.1, "lr": 0.12},
    {"row_lr": 10.0, "batch_size": 64, "temperature": 0.1, "head": "linear"},
    {"row_lr": 10.0, "batch_size": 64, "temperature": 0.1, "head": "linear", "hardest": 100, "smoothing": 0.2},
    {"row_lr": 10.0, "batch_size": 64, "temperature": 0.07, "head": "linear"},
    {"row_lr": 10.0, "batch_size": 32, "temperature": 0.1, "head": "linear"},
    {"row_lr": 10.0, "batch_size": 64, "temperature": 0.1, "head": "linear", "warmup_epochs": 0},
    {"row_lr": 10.0, "batch_size": 64, "temperature": 0.1, "head": "none"},
    {"row_lr": 5.0, "batch_size": 64, "temperature": 0.1, "head": "linear", "lr": 0.12},
    {"row_lr": 3.0, "batch_size": 64, "temperature": 0.1, "head": "linear"},
]
# Batches of 32 did as well, but cost more with more images: every step updates all rows.
CHOSEN = {"row_lr": 10.0, "batch_size": 64, "temperature": 0.1, "head": "linear"}


def tried() -> list[Job]:
    """Every setting for five epochs of seed 0."""
    return [job(changes, 5, 0) for changes in CHANGES]


def chosen(seed: int) -> Job:
    """The presets' values, for ten epochs of another seed."""
    return job(CHOSEN, 10, seed)


def job(changes: dict, epochs: int, seed: int) -> Job:
    values = {**BASE, **changes}
    name = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in values.items())
    return Job(cell(name, epochs, **values), seed, OUT)


def common(data: str, test_data: str | None) -> dict:
    """Settings of all runs."""
    some = {"max_images": IMAGES, "eval_images": 5000}
    return {"preset": "cifar10-small", **SGD, "batch_size": BATCH_SIZE, "data": data, "test_data": test_data, **some}


def table(jobs: list[Job]) -> str:
    columns = {"lr": "lr", "row_lr": "row lr", "temperature": "temperature", "batch_size": "batch", "head": "head"}
    lines = [f"| {' | '.join(columns.values())} | other | k-NN | linear | instance top-1 |", "|---" * 9 + "|"]
    usual = {**cell("", 5).settings, **BASE}
    finished = [(each, json.loads(each.result.read_text())) for each in jobs if each.result.exists()]
    for each, result in sorted(finished, key=lambda item: -item[1]["knn_200"]):
        settings = {"batch_size": BATCH_SIZE, **each.cell.settings}
        values = [str(settings[name]) for name in columns]
        other = [name for name, value in settings.items() if name not in columns and value != usual.get(name)]
        values.append(", ".join(f"{name} {settings[name]}".replace("_", " ") for name in other))
        values += [f"{100 * result[key]:.1f}" for key in ("knn_200", "linear_top1", "instance_top1")]
        lines.append(f"| {' | '.join(values)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("tune", "run"))
    parser.add_argument("--data", required=True)
    parser.add_argument("--test-data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    jobs = tried() if asked.part == "tune" else [chosen(seed) for seed in asked.seeds]
    with messages():
        run_jobs(jobs, common(asked.data, asked.test_data), asked.jobs, num_cores(), lambda: None)
    if asked.part == "tune":
        write_between_marks(ROOT / "docs" / "experiments.md", "tuning", table(jobs))


if __name__ == "__main__":
    main()

"""Learning rates, temperature and row length for small encoders: found with one seed on one data set.

    python benchmarks/tuning.py --data cifar10/train --test-data cifar10/test

Runs are the cells of a study, so those that are finished are not run again. What is best here becomes the small
presets' default; it is reported with other seeds and on another set (`millionway study`).
"""

import argparse
import json
from pathlib import Path

from presets import write_between_marks

from millionway.console import messages
from millionway.environment import num_cores
from millionway.studies.cells import Job, run_jobs
from millionway.studies.grids import Cell, cell

ROOT = Path(__file__).parent.parent
OUT = ROOT / "benchmarks" / "results" / "tuning"
SEED, EPOCHS, IMAGES = 0, 5, 10_000
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
]


def cells() -> list[Cell]:
    made = []
    for changes in CHANGES:
        values = {**BASE, **changes}
        name = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in values.items())
        made.append(cell(name, EPOCHS, **values))
    return made


def table(jobs: list[Job]) -> str:
    results = {job.cell.name: json.loads(job.result.read_text()) for job in jobs if job.result.exists()}
    lines = ["| settings | k-NN | linear | instance top-1 |", "|---|---|---|---|"]
    for name, result in sorted(results.items(), key=lambda item: -item[1]["knn_200"]):
        numbers = " | ".join(f"{100 * result[key]:.1f}" for key in ("knn_200", "linear_top1", "instance_top1"))
        lines.append(f"| {name} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--test-data")
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args()
    settings = {"preset": "cifar10-small", "data": chosen.data, "max_images": IMAGES, "eval_images": 5000}
    settings |= {"test_data": chosen.test_data} if chosen.test_data else {}
    jobs = [Job(each, SEED, OUT) for each in cells()]
    with messages():
        run_jobs(jobs, settings, chosen.jobs, num_cores(), lambda: None)
    write_between_marks(ROOT / "docs" / "experiments.md", "tuning", table(jobs))
    print(table(jobs))


if __name__ == "__main__":
    main()

"""The evidence in docs/experiments.md: the paper's ablations on CIFAR-10 and Fashion-MNIST, with a small encoder.

    python benchmarks/studies.py --cifar10 FOLDER [--jobs 2]      # FOLDER/train/CLASS/*.png, FOLDER/test/CLASS/*.png
    python benchmarks/studies.py --cifar10 FOLDER --only sampling --cells "all classes" "512 classes (2^16)"

About eight hours on 2 cores; finished runs in benchmarks/results/studies are not run again. Fashion-MNIST is Debian's
package dataset-fashion-mnist, or torchvision's download.
"""

import argparse
from pathlib import Path

from presets import write_between_marks

import millionway
from millionway.console import messages
from millionway.studies.cells import CellsFailed
from millionway.train.stops import Interrupted

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "studies"
SEEDS, EPOCHS = (1, 2, 3), (10,)
# Learning rates by benchmarks/tuning.py; head, temperature and smoothing are the paper's.
VALUES = {
    "encoder": "narrow-resnet",
    "batch_size": 256,
    "lr": 0.06,
    "row_norm": 1.0,
    "row_lr": 50.0,
    "eval_images": 5000,
    "encoder_precision": "float32",
}
PLAN = [
    ("cifar10", "prior-similarity"),
    ("cifar10", "initialization"),
    ("cifar10", "components"),
    ("cifar10", "instance-vs-semantic"),
    ("fashion-mnist", "prior-similarity"),
    ("fashion-mnist", "initialization"),
    ("cifar10", "smoothing"),
    ("fashion-mnist", "components"),
    ("fashion-mnist", "instance-vs-semantic"),
    ("cifar10", "sampling"),
    ("cifar10", "views"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=sorted({study for _, study in PLAN}), help="studies to run")
    parser.add_argument("--cells", nargs="+", default=(), help="rows of the one study to run, by name")
    chosen = parser.parse_args()
    fashion = {"image_size": 28, "mean": (0.286,) * 3, "std": (0.353,) * 3}
    data = {
        "cifar10": {"data": str(chosen.cifar10 / "train"), "test_data": str(chosen.cifar10 / "test"), "set": VALUES},
        "fashion-mnist": {"data": "fashion-mnist", "set": {**VALUES, **fashion}},
    }
    failed = []
    for name, study in PLAN:
        if chosen.only and study not in chosen.only:
            continue
        try:
            with messages():
                table = millionway.study(
                    study,
                    out=RESULTS / name,
                    seeds=SEEDS,
                    epochs=EPOCHS,
                    jobs=chosen.jobs,
                    cells=chosen.cells,
                    preset="cifar10",
                    max_images=10_000,
                    **data[name],
                )
        except CellsFailed as error:
            failed.append(f"{study} on {name}: {error}")
            continue
        except Interrupted as error:
            raise SystemExit(str(error)) from None
        path = table.relative_to(ROOT / "benchmarks").with_suffix(".svg")
        text = f"{table.read_text().strip()}\n\n![{study} on {name}](../benchmarks/{path})"
        write_between_marks(ROOT / "docs" / "experiments.md", f"study {study} {name}", text)
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()

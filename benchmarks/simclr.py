"""SimCLR on the same encoder, views and epochs: what instance classification is compared with.

    python benchmarks/simclr.py tune --data cifar10/train --test-data cifar10/test      # one seed, some settings
    python benchmarks/simclr.py run --data cifar10/train --test-data cifar10/test       # other seeds, and the table

Its loss (NT-Xent) compares the two views of an image with all other views of the batch. Learning rate, temperature,
batch size and head are chosen with seed 0 on CIFAR-10, as ours are (`benchmarks/tuning.py`), by k-NN.
"""

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import tuning
from presets import write_between_marks

from millionway.data.batches import view_batches
from millionway.data.dataset import Dataset, open_dataset, open_test
from millionway.data.sampler import Sampler
from millionway.data.views import view_keys
from millionway.evaluation.features import Split, extract_split, labeled_split
from millionway.evaluation.knn import knn
from millionway.evaluation.linear import linear
from millionway.files import write_whole
from millionway.machine import describe_environment, num_cores
from millionway.model.schedule import learning_rate
from millionway.parallel.group import Group
from millionway.settings.presets import preset
from millionway.settings.pretrain import Pretrain, with_settings
from millionway.studies import markdown
from millionway.train.setup import build, resolve

RESULTS = Path(__file__).parent / "results" / "simclr"
DOCUMENT = Path(__file__).parent.parent / "docs" / "experiments.md"
CPU = torch.device("cpu")
PRESET = "cifar10-small"


@dataclass(frozen=True)
class Values:
    """What is chosen for SimCLR."""

    lr: float
    temperature: float
    batch_size: int
    head: str = "mlp"

    @property
    def name(self) -> str:
        return f"tune_lr{self.lr:g}_t{self.temperature:g}_b{self.batch_size}_{self.head}"


GRID = [Values(lr, 0.2, 256) for lr in (0.06, 0.12, 0.24)] + [Values(lr, 0.5, 256) for lr in (0.06, 0.12)]
GRID += [Values(lr, 0.2, 64) for lr in (0.03, 0.06, 0.12)] + [Values(0.06, 0.5, 64), Values(0.06, 0.2, 64, "linear")]
GRID += [Values(0.06, 0.1, 64), Values(0.06, 0.1, 64, "linear"), Values(0.12, 0.2, 256, "linear")]


def nt_xent(x: torch.Tensor, temperature: float) -> torch.Tensor:
    """x: [2 x images, dim], the second half the other views."""
    unit = F.normalize(x)
    logits = (unit @ unit.T / temperature).fill_diagonal_(-torch.inf)
    targets = torch.arange(len(x)).roll(len(x) // 2)
    return F.cross_entropy(logits, targets)


def train(config: Pretrain, dataset: Dataset, split: Split, few: Split | None, temperature: float) -> dict:
    """Numbers of an encoder after the run, and k-NN along it on fewer images if there are any."""
    group = Group.current()
    config = resolve(config, dataset, CPU, group)
    state, spec = build(config, dataset, CPU, group)
    training, network = config.training, state.network
    assert training.batch_size and training.lr and training.warmup_epochs is not None
    sampler = Sampler(dataset.instance_ids, training.batch_size, training.seed)
    per_epoch = sampler.steps_per_epoch
    num_steps = training.epochs * per_epoch
    keys = [view_keys(training.seed, epoch, 2) for epoch in range(training.epochs)]
    batches = ((keys[step // per_epoch], sampler.batch(step)) for step in range(num_steps))
    curve = []
    for step, (views, _) in enumerate(
        view_batches(dataset.store, batches, spec.image_size, CPU, **config.augmentation.of_a_view)
    ):
        for part in state.optimizer.param_groups:
            part["lr"] = learning_rate(step, num_steps, training.warmup_epochs * per_epoch, training.lr)
        loss = nt_xent(network(views).float(), temperature)
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        if few is not None and (step + 1) % per_epoch == 0:
            epoch = (step + 1) // per_epoch
            scores = dict(knn(*extract_split(network.encoder, few, spec.image_size, CPU)))
            curve.append({"epoch": epoch, "loss": float(loss), **scores})
            print(curve[-1], flush=True)
    features = extract_split(network.encoder, split, spec.image_size, CPU)
    return {**dict(knn(*features)), **dict(linear(*features, training.seed)), "curve": curve}


def best_values() -> Values:
    """The best of the grid by k-NN."""
    missing = [values.name for values in GRID if not path_of(values.name).exists()]
    if missing:
        raise SystemExit(f"run `tune` first: {', '.join(missing)} are missing")
    return max(GRID, key=lambda values: read(path_of(values.name))["knn_200"])


def path_of(name: str) -> Path:
    return RESULTS / f"{name}.json"


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def write_tried() -> None:
    lines = ["| lr | temperature | batch | head | k-NN | linear |", "|---" * 6 + "|"]
    results = [read(path_of(values.name)) for values in GRID]
    for result in sorted(results, key=lambda result: -result["knn_200"]):
        values = [f"{result[key]}" for key in ("lr", "temperature", "batch_size", "head")]
        values += [f"{100 * result[key]:.1f}" for key in ("knn_200", "linear_top1")]
        lines.append(f"| {' | '.join(values)} |")
    write_between_marks(DOCUMENT, "simclr tuning", "\n".join(lines))


def write_table(seeds: list[int]) -> None:
    """Beside our own choice."""
    theirs = {seed: read(path_of(f"{PRESET}_s{seed}")) for seed in seeds}
    paths = {seed: tuning.chosen(seed).result for seed in seeds}
    if missing := [path.stem for path in paths.values() if not path.exists()]:
        raise SystemExit(f"kept; for the table run `benchmarks/tuning.py run` too: {', '.join(missing)} are missing")
    ours = {seed: read(path) for seed, path in paths.items()}
    numbers = {"SimCLR": theirs, "instance classification": ours}
    best = best_values()
    lines = [
        markdown.accuracy_table(numbers, {}, "", (1, 2, 5, 10)),
        markdown.difference_table(numbers, [("instance classification", "SimCLR")], (1, 2, 5, 10)),
        f"SimCLR: learning rate {best.lr:g}, temperature {best.temperature:g}, batches of {best.batch_size}, "
        f"{best.head} head, the best of {len(GRID)} after 5 epochs of seed 0. Ours: {tuning.chosen(0).cell.name}, "
        f"chosen from {len(tuning.CHANGES)}.",
    ]
    write_between_marks(DOCUMENT, f"simclr {PRESET}", "\n\n".join(lines))


@dataclass(frozen=True)
class Job:
    name: str
    seed: int
    epochs: int
    values: Values

    @property
    def result(self) -> Path:
        return path_of(self.name)


def run(job: Job, chosen: argparse.Namespace) -> None:
    torch.set_num_threads(max(1, num_cores() // chosen.jobs))
    dataset = open_dataset(chosen.data, max_images=tuning.IMAGES)
    test = open_test(chosen.data, chosen.test_data, None)
    split = labeled_split(dataset, test, 0, None)
    few = labeled_split(dataset, test, 0, 5000) if chosen.part == "run" else None
    assert split is not None
    values = asdict(job.values)
    settings = {"data": chosen.data, "seed": job.seed, "epochs": job.epochs, **tuning.SGD, **values}
    result = train(with_settings(preset(PRESET), **settings), dataset, split, few, job.values.temperature)
    about = {"seed": job.seed, **values, "environment": json.loads(describe_environment(CPU))}
    write_whole(job.result, json.dumps({**result, **about}, indent=1) + "\n")
    print(job.name, {key: round(100 * result[key], 1) for key in ("knn_200", "linear_top1")}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("tune", "run"))
    parser.add_argument("--data", required=True)
    parser.add_argument("--test-data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    chosen = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if chosen.part == "tune":
        jobs = [Job(values.name, 0, 5, values) for values in GRID]
    else:
        jobs = [Job(f"{PRESET}_s{seed}", seed, 10, best_values()) for seed in chosen.seeds]
    with ProcessPoolExecutor(chosen.jobs, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(partial(run, chosen=chosen), [job for job in jobs if not job.result.exists()]))
    if chosen.part == "tune":
        write_tried()
    else:
        write_table(chosen.seeds)


if __name__ == "__main__":
    main()

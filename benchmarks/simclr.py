"""SimCLR on the same encoder, head, views, batches and epochs: what instance classification is compared with.

    python benchmarks/simclr.py tune --data cifar10/train --test-data cifar10/test      # one seed, some settings
    python benchmarks/simclr.py run --data cifar10/train --test-data cifar10/test       # other seeds, and the table

Its loss (NT-Xent) compares the two views of an image with all other views of the batch. Learning rate and temperature
are chosen with seed 0 on CIFAR-10, as ours are (`benchmarks/tuning.py`), by k-NN.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from presets import write_between_marks

from millionway import randomness
from millionway.config import Pretrain, with_settings
from millionway.data.dataset import Dataset, open_dataset, open_test
from millionway.data.loader import view_batches
from millionway.data.sampler import Sampler
from millionway.environment import describe_environment
from millionway.evaluation.features import Split, extract_labelled, labelled_split
from millionway.evaluation.knn import knn
from millionway.evaluation.linear import linear
from millionway.files import write_whole
from millionway.parallel.group import Group
from millionway.presets import preset
from millionway.studies import tables
from millionway.train.schedule import learning_rate
from millionway.train.setup import build, resolve

RESULTS = Path(__file__).parent / "results" / "simclr"
GRID = [(lr, tau) for tau in (0.2, 0.5) for lr in (0.06, 0.12, 0.24)]
CPU = torch.device("cpu")


def nt_xent(x: torch.Tensor, temperature: float) -> torch.Tensor:
    """x: [2 x images, dim], the second half the other views."""
    unit = F.normalize(x)
    logits = (unit @ unit.T / temperature).fill_diagonal_(-torch.inf)
    targets = torch.arange(len(x)).roll(len(x) // 2)
    return F.cross_entropy(logits, targets)


def train(config: Pretrain, dataset: Dataset, split: Split, few: Split, lr: float, temperature: float) -> dict:
    """Numbers of an encoder after the run, and k-NN along it on fewer images."""
    group = Group.current()
    config = resolve(config, dataset, CPU, group)
    state, spec = build(config, dataset, CPU, group)
    training, network = config.training, state.network
    assert training.batch_size and training.warmup_epochs is not None
    sampler = Sampler(dataset.instance_ids, training.batch_size, training.seed)
    per_epoch = sampler.steps_per_epoch
    num_steps = training.epochs * per_epoch
    keys = [
        [randomness.key_of(training.seed, "view", epoch, view) for view in (0, 1)] for epoch in range(training.epochs)
    ]
    batches = ((keys[step // per_epoch], sampler.batch(step)) for step in range(num_steps))
    curve = []
    for step, (views, _) in enumerate(
        view_batches(dataset.store, batches, spec.image_size, CPU, **config.views.augmentation)
    ):
        for part in state.optimizer.param_groups:
            part["lr"] = learning_rate(step, num_steps, training.warmup_epochs * per_epoch, lr)
        loss = nt_xent(network(views).float(), temperature)
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        if (step + 1) % per_epoch == 0:
            curve.append({"epoch": (step + 1) // per_epoch, "loss": float(loss), **_knn(network.encoder, few, spec)})
            print(curve[-1], flush=True)
    parts = [extract_labelled(network.encoder, part, spec.image_size, CPU) for part in (split.bank, split.queries)]
    (bank, bank_labels), (queries, query_labels) = parts
    numbers = dict(knn(bank, bank_labels, queries, query_labels))
    numbers |= dict(linear(bank, bank_labels, queries, query_labels, training.seed))
    return {**numbers, "curve": curve, "lr": lr, "temperature": temperature}


def _knn(encoder: torch.nn.Module, split: Split, spec) -> dict:
    (bank, labels), (queries, answers) = (
        extract_labelled(encoder, part, spec.image_size, CPU) for part in (split.bank, split.queries)
    )
    return dict(knn(bank, labels, queries, answers))


def chosen_values() -> tuple[float, float]:
    """The best of the grid by k-NN."""
    missing = [name for name, _ in tuned() if not (RESULTS / f"{name}.json").exists()]
    if missing:
        raise SystemExit(f"run `tune` first: {', '.join(missing)} are missing")
    results = [json.loads((RESULTS / f"{name}.json").read_text()) for name, _ in tuned()]
    best = max(results, key=lambda result: result["knn_200"])
    return best["lr"], best["temperature"]


def tuned() -> list[tuple[str, tuple[float, float]]]:
    return [(f"tune_lr{lr:g}_t{tau:g}", (lr, tau)) for lr, tau in GRID]


def write_table(name: str, seeds: list[int]) -> None:
    """Beside the runs of `benchmarks/studies.py` with the preset's own settings."""
    theirs = {seed: json.loads((RESULTS / f"{name}_s{seed}.json").read_text()) for seed in seeds}
    cells = RESULTS.parent / "studies" / name.removesuffix("-small") / "cells"
    paths = {seed: cells / f"e10_mlp_batch-bn_k100-a0.2_full_s{seed}.json" for seed in seeds}
    ours = {seed: json.loads(path.read_text()) for seed, path in paths.items() if path.exists()}
    numbers = {"SimCLR": theirs, "instance classification": ours}
    lr, temperature = chosen_values()
    lines = [
        tables.accuracy_table(numbers, {}, "", (1, 2, 5, 10)),
        tables.difference_table(numbers, [("instance classification", "SimCLR")], (1, 2, 5, 10)),
        f"SimCLR: learning rate {lr:g}, temperature {temperature:g}, the best of {len(GRID)} after 5 epochs of seed 0.",
    ]
    write_between_marks(RESULTS.parent.parent.parent / "docs" / "experiments.md", f"simclr {name}", "\n\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("tune", "run"))
    parser.add_argument("--preset", default="cifar10-small")
    parser.add_argument("--data", required=True)
    parser.add_argument("--test-data")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    RESULTS.mkdir(parents=True, exist_ok=True)
    dataset = open_dataset(chosen.data, max_images=chosen.images)
    test = open_test(chosen.data, chosen.test_data, None)
    split, few = (labelled_split(dataset, test, 0, most) for most in (None, 5000))
    assert split is not None and few is not None
    if chosen.part == "tune":
        jobs = [(name, 0, 5, *values) for name, values in tuned()]
    else:
        jobs = [(f"{chosen.preset}_s{seed}", seed, 10, *chosen_values()) for seed in chosen.seeds]
    for name, seed, epochs, lr, temperature in jobs:
        path = RESULTS / f"{name}.json"
        if path.exists():
            continue
        config = with_settings(preset(chosen.preset), data=chosen.data, seed=seed, epochs=epochs)
        result = train(config, dataset, split, few, lr, temperature)
        environment = json.loads(describe_environment(CPU))
        write_whole(path, json.dumps({**result, "seed": seed, "environment": environment}, indent=1) + "\n")
        print(name, {key: round(100 * result[key], 1) for key in ("knn_200", "linear_top1")}, flush=True)
    if chosen.part == "run":
        write_table(chosen.preset, chosen.seeds)


if __name__ == "__main__":
    main()

"""Is a small model of timm as fast and as good on a CPU as the narrow ResNet? Then that one would not be needed.

    python benchmarks/small_encoders.py --data cifar10/train --test-data cifar10/test --seconds 75

Each trains on the same 10,000 images for the same CPU seconds, one thread, with pretrain's own settings; the learning
rate falls with the seconds spent. `results/small_encoders.json` keeps the numbers, docs/experiments.md the table.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from presets import write_between_marks

from millionway.data.batches import plain_batches, view_batches
from millionway.data.dataset import open_dataset
from millionway.data.sampler import Sampler
from millionway.data.views import view_keys
from millionway.evaluation.features import extract_split, labeled_split
from millionway.evaluation.knn import knn
from millionway.machine import describe_environment
from millionway.model.encoder import full_name
from millionway.model.prior import PriorProgress, write_prior
from millionway.parallel.group import Group
from millionway.settings.presets import preset
from millionway.settings.pretrain import with_settings
from millionway.train.setup import build, resolve
from millionway.train.step import train_step

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "small_encoders.json"
ENCODERS = ("narrow-resnet", "timm/mobilenetv3_small_050", "timm/resnet10t", "timm/lcnet_050")
NUM_IMAGES, NUM_QUERIES, WARM_UP = 10_000, 5000, 0.1
CPU = torch.device("cpu")


def measure(name: str, chosen: argparse.Namespace) -> dict[str, Any]:
    dataset = open_dataset(chosen.data, max_images=NUM_IMAGES, num_threads=1)
    test = open_dataset(chosen.test_data, num_threads=1)
    config = with_settings(preset("cifar10-small"), data=chosen.data, encoder=full_name(name), stem="auto")
    config = resolve(with_settings(config, image_size=chosen.image_size), dataset, CPU, Group.current())
    state, spec = build(config, dataset, CPU, Group.current())
    method, training = config.classifier, config.training
    assert training.batch_size and training.lr and method.row_lr
    sampler, size = Sampler(dataset.instance_ids, training.batch_size, chosen.seed), spec.image_size
    plain = plain_batches(dataset.store, torch.cat(sampler.pass_over_all()), size, training.batch_size, CPU)
    norm = None if method.row_norm == "prior" else method.row_norm
    write_prior(method.prior, state.network, state.classifier, plain, norm, PriorProgress())
    split = labeled_split(dataset, test, chosen.seed, NUM_QUERIES)
    assert split is not None
    untrained = dict(knn(*extract_split(state.network.encoder, split, size, CPU)))

    def batches():
        for step in range(1 << 30):
            yield view_keys(chosen.seed, step, config.augmentation.views), sampler.batch(step)

    made = view_batches(dataset.store, batches(), size, CPU, **config.augmentation.of_a_view)
    started, steps = time.process_time(), 0
    while (spent := (time.process_time() - started) / chosen.seconds) < 1:
        views, ids = next(made)
        lr = training.lr * (spent / WARM_UP if spent < WARM_UP else 0.5 * (1 + math.cos(math.pi * spent)))
        train_step(
            state.network,
            state.classifier,
            state.optimizer,
            views,
            ids,
            None,
            alpha=0.0,
            pairs=method.pairs or 0.0,
            lr=lr,
            row_lr=lr * method.row_lr,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
        )
        steps += 1
    trained = dict(knn(*extract_split(state.network.encoder, split, size, CPU)))
    return {
        "encoder": name,
        "parameters": sum(each.numel() for each in state.network.encoder.parameters()),
        "images_per_cpu_second": steps * training.batch_size / chosen.seconds,
        "knn_20": trained["knn_20"],
        "knn_20_after_prior": untrained["knn_20"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--test-data", required=True)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    measured = []
    for name in ENCODERS:
        measured.append(measure(name, chosen))
        print(json.dumps(measured[-1]), flush=True)
    about = {"seconds": chosen.seconds, "seed": chosen.seed, "image_size": chosen.image_size, "images": NUM_IMAGES}
    environment = json.loads(describe_environment(CPU))
    RESULT.write_text(json.dumps({**about, "encoders": measured, "environment": environment}, indent=1) + "\n")
    lines = [
        "| encoder | parameters | images per CPU second | k-NN, k = 20 | before training |",
        "|---|---|---|---|---|",
    ]
    for each in measured:
        scores = f"{each['knn_20']:.1%} | {each['knn_20_after_prior']:.1%}"
        speed = f"{each['images_per_cpu_second']:.0f}"
        lines.append(f"| {each['encoder']} | {each['parameters'] / 1e6:.1f} M | {speed} | {scores} |")
    lines += ["", f"{NUM_IMAGES:,} images of {chosen.image_size} px, {chosen.seconds:g} CPU seconds each, one run each"]
    lines[-1] += f" (seed {chosen.seed}), commit {environment['commit']}."
    write_between_marks(ROOT / "docs" / "experiments.md", "small models", "\n".join(lines))


if __name__ == "__main__":
    main()

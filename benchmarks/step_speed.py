"""Images per CPU second of training, from files to moved weights: ours against lightly's SimCLR with its own loader.

    python benchmarks/step_speed.py --data cifar10/train --image-size 32
    python benchmarks/step_speed.py --data photos --image-size 224

The same narrow ResNet for all, one thread, reading in the same process. Sides take turns step by step, so that
neighbors on the machine slow all alike. `results/step_speed_SIZE.json` keeps the medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightly.data import LightlyDataset
from lightly.transforms import SimCLRTransform
from peer_methods import Values, build_peer
from torch.utils.data import DataLoader

from millionway.data.batches import view_batches
from millionway.data.dataset import open_dataset
from millionway.data.sampler import Sampler
from millionway.data.views import view_keys
from millionway.machine import describe_environment
from millionway.model.encoder import EncoderSpec, build_encoder
from millionway.parallel.group import Group
from millionway.settings.presets import preset
from millionway.settings.pretrain import IMAGENET_MEAN, IMAGENET_STD, with_settings
from millionway.settings.resolve import choose_stem
from millionway.train.setup import build, resolve
from millionway.train.step import train_step

RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")
WARM_UP = 2


def ours(data: str, size: int, batch_size: int, **settings: Any) -> Iterator[None]:
    config = with_settings(preset("cifar10-small"), data=data, image_size=size, stem="auto", **settings)
    config = with_settings(config, batch_size=batch_size, blur=0.0 if size <= 64 else 0.5)
    dataset = open_dataset(data, num_threads=1)
    config = resolve(config, dataset, CPU, Group.current())
    state, spec = build(config, dataset, CPU, Group.current())
    sampler, method = Sampler(dataset.instance_ids, batch_size, 0), config.classifier
    options = {"pairs": method.pairs or 0.0, "num_classified": batch_size * (method.row_views or 1)}
    batches = ((view_keys(0, step, config.augmentation.views), sampler.batch(step)) for step in range(1 << 20))
    for views, ids in view_batches(dataset.store, batches, spec.image_size, CPU, **config.augmentation.of_a_view):
        rates = {"lr": 1e-3, "row_lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-4}
        train_step(state.network, state.classifier, state.optimizer, views, ids, None, alpha=0.0, **options, **rates)
        yield


def lightly(data: str, size: int, batch_size: int) -> Iterator[None]:
    stem = choose_stem("narrow-resnet", "auto", size)
    encoder = build_encoder(EncoderSpec("narrow-resnet", stem, size, (0.0,) * 3, (1.0,) * 3))  # the transform does it
    peer = build_peer("SimCLR", encoder, Values(batch_size=batch_size))
    normalize = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    strength, blur = (0.5, 0.0) if size <= 64 else (1.0, 0.5)
    transform = SimCLRTransform(input_size=size, cj_strength=strength, gaussian_blur=blur, normalize=normalize)
    loader = DataLoader(LightlyDataset(data, transform=transform), batch_size, shuffle=True, drop_last=True)
    while True:
        for views, *_ in loader:
            peer.step(*views, 1e-3)
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    at = (chosen.data, chosen.image_size, chosen.batch_size)
    sides = {
        "ours, 1 view": ours(*at, views=1),
        "ours, 2 views": ours(*at, views=2),
        "lightly SimCLR, 2 views": lightly(*at),
    }
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(chosen.rounds + WARM_UP):
        for name, steps in sides.items():
            started = time.process_time()
            next(steps)
            spent[name].append(time.process_time() - started)
    speeds = {name: chosen.batch_size / statistics.median(times[WARM_UP:]) for name, times in spent.items()}
    theirs = speeds["lightly SimCLR, 2 views"]
    ratios = {f"{name} / lightly SimCLR": speed / theirs for name, speed in speeds.items() if name.startswith("ours")}
    environment = json.loads(describe_environment(CPU))
    result = {"image_size": chosen.image_size, "batch_size": chosen.batch_size, "images_per_cpu_second": speeds}
    result |= {**ratios, "environment": environment}
    text = json.dumps(result, indent=1) + "\n"
    (RESULTS / f"step_speed_{chosen.image_size}.json").write_text(text)
    print({name: round(value, 2) for name, value in (speeds | ratios).items()})


if __name__ == "__main__":
    main()

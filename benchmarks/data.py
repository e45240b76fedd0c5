"""Is data ever the bottleneck? Views, loading, indexing and opening, against torchvision, kornia and bare loops.

    python benchmarks/data.py --cifar10 FOLDER --photos FOLDER
    python benchmarks/data.py --many-paths

FOLDER/train/CLASS/*.png, and a folder of photos, which are stored as JPEG of 500 x 375 pixels first. All sides of a
figure alternate in one run on the same cores; ratios of medians.
"""

import argparse
import hashlib
import io
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path

import kornia.augmentation as kornia
import numpy as np
import pyarrow as pa
import torch
import torchvision.transforms.v2 as v2
from PIL import Image, ImageFilter
from presets import write_between_marks
from timing import alternate
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder

import millionway
from millionway.data.batches import view_batches
from millionway.data.dataset import open_dataset
from millionway.data.indexing import build_manifest
from millionway.data.kinds.folders import open_folder
from millionway.data.manifest import SCHEMA, Manifest
from millionway.data.stores import FileStore, MemoryStore
from millionway.machine import describe_environment, num_cores
from millionway.reporting.metrics import read_metrics

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
TURNS = 5
BATCH_SIZE = 256
AUGMENTATION = {"crop_min": 0.08, "flip": 0.5, "jitter": 1.0, "grayscale": 0.2, "blur": 0.5}
MANY = 14_000_000
VERY_MANY, LETTERS = 30_000_000, 72  # more than 2 GiB of letters


def all_views(store: MemoryStore | FileStore, num_images: int, size: int, batch_size: int) -> None:
    batches = [([1, 2], ids) for ids in torch.arange(num_images).split(batch_size)]
    for _ in view_batches(store, batches, size, CPU, **AUGMENTATION):
        pass


def jitter() -> v2.Transform:
    return v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8)


class TwoViews(Dataset):
    """Images in memory, each transformed twice, as a training set of torchvision's does it."""

    def __init__(self, pixels: torch.Tensor) -> None:
        self.pixels = pixels
        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop(pixels.shape[-1], scale=(0.08, 1.0), antialias=True),
                v2.RandomHorizontalFlip(),
                jitter(),
                v2.RandomGrayscale(0.2),
                v2.RandomApply([v2.GaussianBlur(3, (0.1, 2.0))], p=0.5),
                v2.ToDtype(torch.float32, scale=True),
            ]
        )

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.transform(self.pixels[index]), self.transform(self.pixels[index])


def small_views(pixels: torch.Tensor) -> dict[str, list[float]]:
    """32 px in memory, two views of each image."""
    store, size = MemoryStore(pixels), pixels.shape[-1]
    loader = DataLoader(TwoViews(pixels), BATCH_SIZE, num_workers=num_cores(), persistent_workers=True)
    batched = kornia.AugmentationSequential(
        kornia.RandomResizedCrop((size, size), scale=(0.08, 1.0)),
        kornia.RandomHorizontalFlip(),
        kornia.ColorJitter(0.8, 0.8, 0.8, 0.2, p=0.8),
        kornia.RandomGrayscale(p=0.2),
        kornia.RandomGaussianBlur((3, 3), (0.1, 2.0), p=0.5),
    )

    def by_kornia() -> None:
        for batch in pixels.split(BATCH_SIZE):
            for _ in range(2):
                batched(batch.float() / 255)

    return alternate(
        {
            "ours": lambda: all_views(store, len(pixels), size, BATCH_SIZE),
            "torchvision": lambda: deque(loader, maxlen=0),
            "kornia": by_kornia,
        },
        TURNS,
    )


class Blur:
    """Pillow's, as in the collections of SimCLR transforms."""

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0))) if random.random() < 0.5 else image


def photo_views(folder: Path) -> dict[str, list[float]]:
    """224 px from JPEG files, two views of each."""
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(224, scale=(0.08, 1.0)),
            v2.RandomHorizontalFlip(),
            jitter(),
            v2.RandomGrayscale(0.2),
            Blur(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    images = ImageFolder(str(folder), transform=lambda image: (transform(image), transform(image)))
    loader = DataLoader(images, 64, num_workers=num_cores(), persistent_workers=True)
    dataset = open_dataset(str(folder), num_threads=num_cores())
    assert isinstance(dataset.store, FileStore)
    store = dataset.store
    return alternate(
        {"ours": lambda: all_views(store, len(images), 224, 64), "torchvision": lambda: deque(loader, maxlen=0)},
        TURNS,
    )


def _look_at(paths: list[str]) -> None:
    """The bare loop: read, hash, decode."""
    for path in paths:
        data = Path(path).read_bytes()
        hashlib.blake2b(data, digest_size=16).hexdigest()
        Image.open(io.BytesIO(data)).load()


def indexing(folder: Path) -> dict[str, list[float]]:
    source = open_folder(folder)
    paths = [source.path(index) for index in range(len(source))]

    def bare() -> None:
        workers = [
            multiprocessing.get_context("fork").Process(target=_look_at, args=(paths[rank :: num_cores()],))
            for rank in range(num_cores())
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return alternate({"ours": lambda: build_manifest(source, num_cores()), "bare": bare}, TURNS)


OPEN = """
import resource, sys, time
import millionway.data.manifest
from pathlib import Path
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.perf_counter()
manifest = millionway.data.manifest.Manifest.load(Path(sys.argv[1]))
assert manifest.readable.sum() == len(manifest) and len(manifest.fingerprint) == 32 and manifest.keys[len(manifest) - 1]
seconds = time.perf_counter() - started
print(seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""


def opening(folder: Path, num: int, letters: int = 0) -> list[list[float]]:
    """[seconds, GiB] of a new process that opens a list of so many images and asks for its fingerprint.

    letters: of a path, at least.
    """
    step = 1_000_000
    tables = []
    for start in range(0, num, step):
        numbers = np.arange(start, min(num, start + step))
        width = np.full(len(numbers), 500, dtype=np.int32)
        columns = {
            "instance_id": numbers,
            "key": [
                f"n{number // 650:08d}/n{number // 650:08d}_{number}.JPEG".rjust(letters, "p") for number in numbers
            ],
            "num_bytes": numbers + 100_000,
            "modified": numbers,
            "width": width,
            "height": width,
            "mode": ["RGB"] * len(numbers),
            "near_empty": np.zeros(len(numbers), dtype=bool),
            "content_hash": [f"{number:032x}" for number in numbers],
            "label": np.full(len(numbers), -1, dtype=np.int32),
            "is_test": np.zeros(len(numbers), dtype=bool),
            "problem": [""] * len(numbers),
        }
        tables.append(pa.table(columns, schema=SCHEMA))
    path = folder / "manifest.arrow"
    Manifest(pa.concat_tables(tables)).save(path)
    found = []
    for _ in range(TURNS):
        done = subprocess.run([sys.executable, "-c", OPEN, str(path)], check=True, capture_output=True, text=True)
        found.append([float(value) for value in done.stdout.split()])
    path.unlink()
    return found


def many_paths() -> None:
    with tempfile.TemporaryDirectory() as folder:
        opened = opening(Path(folder), VERY_MANY, LETTERS)
    environment = json.loads(describe_environment(CPU))
    result = {"images": VERY_MANY, "letters": LETTERS, "opening": opened, "environment": environment}
    (ROOT / "benchmarks" / "results" / "data_many_paths.json").write_text(json.dumps(result, indent=2) + "\n")
    seconds, gib = (statistics.median(each[part] for each in opened) for part in (0, 1))
    words = (
        f"A list of {VERY_MANY:,} images with paths of {LETTERS} letters, {VERY_MANY * LETTERS / 2**30:.1f} GiB: "
        f"opened, checked and asked for its fingerprint in {seconds:.1f} s, with {gib:.2f} GiB of memory. "
        f"Commit {environment['commit']}."
    )
    write_between_marks(ROOT / "docs" / "experiments.md", "many paths", words)
    print(words)


def share_of_data(cifar10: Path, folder: Path) -> list[float]:
    """Of the step time, by the run's own clock, after the first epoch."""
    run = millionway.pretrain(
        cifar10, folder / "run", preset="cifar10-small", max_images=10_000, epochs=3, labels="none", log_every=1
    )
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "epoch"]
    return [line["data_share"] for line in lines[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path)
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--many-paths", action="store_true", help="measure nothing but a list of very many long paths")
    chosen = parser.parse_args()
    torch.set_num_threads(num_cores())
    if chosen.many_paths:
        return many_paths()
    train = chosen.cifar10 / "train"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        photos = folder / "photos" / "all"
        photos.mkdir(parents=True)
        for path in sorted(chosen.photos.iterdir()):
            Image.open(path).convert("RGB").resize((500, 375)).save(photos / f"{path.stem}.jpg", quality=90)
        dataset = open_dataset(str(train), max_images=4096, num_threads=num_cores())
        assert isinstance(dataset.store, MemoryStore)
        seconds = {
            "32 px": small_views(dataset.store.pixels),
            "224 px": photo_views(photos.parent),
            "index, 32 px": indexing(train),
            "index, photos": indexing(photos),
        }
        opened = opening(folder, MANY)
        shares = share_of_data(train, folder)
    median = {
        name: {side: statistics.median(values) for side, values in sides.items()} for name, sides in seconds.items()
    }
    num_small, num_photos = 4096, len(os.listdir(chosen.photos))
    figures = {
        "32 px in memory, 2 views: torchvision v2 / ours": median["32 px"]["torchvision"] / median["32 px"]["ours"],
        "the same: kornia / ours": median["32 px"]["kornia"] / median["32 px"]["ours"],
        "224 px from JPEG: torchvision / ours": median["224 px"]["torchvision"] / median["224 px"]["ours"],
        "share of a step lost to data": statistics.median(shares),
        "index, 32 px: bare loop / ours": median["index, 32 px"]["bare"] / median["index, 32 px"]["ours"],
        "index, photos: bare loop / ours": median["index, photos"]["bare"] / median["index, photos"]["ours"],
        "opening 14,000,000 rows, s": statistics.median(each[0] for each in opened),
        "opening 14,000,000 rows, GiB": statistics.median(each[1] for each in opened),
    }
    result = {
        "figures": figures,
        "views_per_second": {
            **{f"32 px, {side}": 2 * num_small / value for side, value in median["32 px"].items()},
            **{f"224 px, {side}": 2 * num_photos / value for side, value in median["224 px"].items()},
        },
        "seconds": seconds,
        "opening": opened,
        "data_shares": shares,
        "environment": json.loads(describe_environment(CPU)),
    }
    (ROOT / "benchmarks" / "results" / "data.json").write_text(json.dumps(result, indent=2) + "\n")
    lines = ["| figure | value |", "|---|---|", *(f"| {name} | {value:.2f} |" for name, value in figures.items()), ""]
    speeds = "; ".join(f"{name} {value:,.0f}" for name, value in result["views_per_second"].items())
    lines.append(f"Views per second: {speeds}. Commit {result['environment']['commit']}.")
    write_between_marks(ROOT / "docs" / "experiments.md", "data", "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()

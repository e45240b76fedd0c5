"""Ideas for a better encoder per CPU second, one at a time, on seed 0 of CIFAR-10: what is worth being built?

    python benchmarks/candidates.py run --data cifar10/train --test-data cifar10/test
    python benchmarks/candidates.py run --set icons --data icons/train --test-data icons/test   # icons.py ... --next
    python benchmarks/candidates.py table

All rows in one matrix and plain autograd, so that an idea takes a few lines; products are in bfloat16, where the
processor has instructions for it. CPU seconds are therefore only to be compared with each other. What helps here is
then built into the package and measured with other seeds by `peers.py`. Finished cells are kept and not run again.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightly.utils.lars import LARS
from presets import write_between_marks
from torch import Tensor, nn

from millionway import randomness
from millionway.data.batches import plain_batches, view_batches
from millionway.data.dataset import Dataset, open_dataset, open_test
from millionway.data.sampler import Sampler
from millionway.data.views import view_keys
from millionway.evaluation.features import Split, extract_split, labeled_split
from millionway.evaluation.knn import knn
from millionway.evaluation.linear import linear
from millionway.files import write_whole
from millionway.machine import describe_environment
from millionway.model.encoder import EncoderSpec, build_encoder
from millionway.model.schedule import learning_rate
from millionway.settings.presets import preset
from millionway.train.muon import Muon

RESULTS = Path(__file__).parent / "results" / "candidates"
DOCUMENT = Path(__file__).parent.parent / "docs" / "experiments.md"
IMAGES, CPU = 10_000, torch.device("cpu")
SIDES = {"cifar10": 32, "icons": 64}


@dataclass(frozen=True)
class Idea:
    """What may differ from the presets' values with one view."""

    method: str = "rows"
    """or pairs: SimCLR's loss on the two views, no rows"""
    epochs: int = 6
    views: int = 1
    batch: int = 64
    optimizer: str = "sgd"
    lr: float = 0.06
    row_rate: float = 0.6
    temperature: float = 0.1
    head: str = "linear"
    """or linear-bn: normalized over the batch, not scaled"""
    dim: int = 128
    neighbors: float = 0.0
    """share of the label that the 10 nearest rows get after a third of the run, in a cross-entropy"""
    batch_negatives: float = 0.0
    """weight of the log-sum-exp over the other embeddings of the batch"""
    fresh_positive: bool = False
    """the other view of the step stands for the rows of its images; the rows learn beside it"""
    pairs: float = 0.0
    """weight of SimCLR's loss on the two views, beside that of the rows"""
    decoupled: bool = False
    """there the own pair is left out of the sum that it is compared with"""
    rows: float = 1.0
    """weight of the rows' loss for the encoder"""
    negatives: int = 0
    """compare with as many random rows and the batch's own; 0: with all"""
    crop_min: float | None = None
    """smallest area of a crop; by default the preset's, as the next"""
    jitter: float | None = None
    row_decay: float = 1e-4
    row_momentum: float = 0.9
    margin: float = 0.0
    """is taken off the cosine with the own row"""
    second_head: bool = False
    """the pairs have a head of their own"""
    window: int = 0
    """a quarter of the images is visited so many times while it moves on by its length, as in PIC"""
    small_size: int = 0
    """side of the images at first"""
    small_share: float = 0.7
    """of the steps"""
    set: str = "cifar10"
    crops: int = 0
    """further views of 0.6 of the side, for the rows alone, as in SwAV"""

    @property
    def size(self) -> int:
        return SIDES[self.set]

    @property
    def changes(self) -> dict:
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    @property
    def result(self) -> Path:
        name = "_".join(f"{name}={value}" for name, value in self.changes.items()) or "usual"
        return RESULTS / f"{name}.json"


MUON = {"optimizer": "muon", "lr": 0.02}
BOTH: dict[str, Any] = {
    "optimizer": "muon",
    "lr": 0.03,
    "row_rate": 1.2,
    "epochs": 4,
    "views": 2,
    "pairs": 1.0,
    "rows": 0.3,
}
"""about the defaults"""
IDEAS = [
    Idea(epochs=10),
    Idea(),
    Idea(head="linear-bn"),
    Idea(**MUON),
    Idea(**MUON, head="linear-bn"),
    Idea(optimizer="muon", lr=0.03, batch=128, row_rate=1.2),
    Idea(method="pairs", epochs=3, views=2, batch=32, **MUON),
    Idea(epochs=3, views=2, batch=32, fresh_positive=True, **MUON),
    Idea(**MUON, row_rate=1.8),
    Idea(**MUON, batch_negatives=1.0),
    Idea(**MUON, temperature=0.2),
    Idea(**MUON, row_rate=1.8, negatives=128),
    Idea(**MUON, row_rate=1.8, negatives=1024),
    Idea(**MUON, epochs=3, views=2, batch=32, pairs=1.0),
    Idea(optimizer="muon", lr=0.03, batch=128, row_rate=1.2, epochs=16),
    Idea(method="pairs", epochs=8, views=2, batch=64, optimizer="muon", lr=0.03),
    Idea(optimizer="muon", lr=0.03, batch=64, row_rate=1.2, epochs=8, views=2, pairs=1.0),
    Idea(method="pairs", optimizer="muon", lr=0.03, epochs=8, views=2, decoupled=True),
    Idea(optimizer="muon", lr=0.03, row_rate=1.2, epochs=8, views=2, pairs=1.0, decoupled=True, rows=0.3),
    Idea(**BOTH),
    Idea(**BOTH, crop_min=0.2),
    Idea(**BOTH, jitter=0.25),
    Idea(**BOTH, jitter=1.0),
    Idea(**BOTH | {"optimizer": "adamw", "lr": 2e-3}),
    Idea(**BOTH | {"optimizer": "lars", "lr": 2.0}),
    Idea(**BOTH, row_decay=0.0),
    Idea(**BOTH, row_decay=1e-3),
    Idea(**BOTH | {"row_rate": 12.0, "row_momentum": 0.0}),
    Idea(**BOTH, margin=0.1),
    Idea(**BOTH, second_head=True),
    Idea(**BOTH, neighbors=0.3),
    Idea(**BOTH, window=2),
    Idea(**BOTH | {"epochs": 5}, small_size=24),
    Idea(**BOTH | {"epochs": 5}, set="icons"),
    Idea(**BOTH | {"epochs": 9}, set="icons", small_size=32),
    Idea(**BOTH | {"epochs": 15}, set="icons", small_size=32, small_share=1.0),
    Idea(**BOTH | {"epochs": 3}, set="icons", crops=4),
]


def build_network(idea: Idea) -> nn.Sequential:
    images = preset("cifar10-small").images
    encoder = build_encoder(EncoderSpec("narrow-resnet", "small", idea.size, images.mean, images.std), 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.key_of(0, "head"))
        normalized = idea.head == "linear-bn"
        head: list[nn.Module] = [nn.Linear(encoder.feature_dim, idea.dim, bias=not normalized)]
        head += [nn.BatchNorm1d(idea.dim, affine=False)] if normalized else []
    return nn.Sequential(encoder, nn.Sequential(*head))


def build_optimizer(idea: Idea, network: nn.Module) -> torch.optim.Optimizer:
    if idea.optimizer == "adamw":
        return torch.optim.AdamW(network.parameters(), lr=idea.lr, weight_decay=0.05)
    kind = {"sgd": torch.optim.SGD, "muon": Muon, "lars": LARS}[idea.optimizer]
    return kind(network.parameters(), lr=idea.lr, momentum=0.9, weight_decay=1e-4)


def view_batches_of(
    idea: Idea, dataset: Dataset, sampler: Sampler, num_steps: int
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Views by their sides, and whose they are."""
    augmentation = preset("cifar10-small").augmentation.of_a_view
    augmentation |= {name: getattr(idea, name) for name in ("crop_min", "jitter") if getattr(idea, name) is not None}
    visits = _window_visits if idea.window else _visits
    batches = list(itertools.islice(visits(idea, sampler), num_steps))
    num_small = round(idea.small_share * num_steps) if idea.small_size else 0
    for size, part in ((idea.small_size, batches[:num_small]), (idea.size, batches[num_small:])):
        large = [(keys[: idea.views], ids) for keys, ids in part]
        made = view_batches(dataset.store, large, size, CPU, **augmentation)
        if not idea.crops:
            yield from (([views], ids) for views, ids in made)
            continue
        crops = [(keys[idea.views :], ids) for keys, ids in part]
        more = view_batches(dataset.store, crops, round(0.6 * size), CPU, **augmentation)
        yield from (([views, small], torch.cat([ids, again])) for (views, ids), (small, again) in zip(made, more))


def _visits(idea: Idea, sampler: Sampler) -> Iterator[tuple[list[int], Tensor]]:
    for step in itertools.count():
        yield view_keys(0, step // sampler.steps_per_epoch, idea.views + idea.crops), sampler.batch(step)


def _window_visits(idea: Idea, sampler: Sampler) -> Iterator[tuple[list[int], Tensor]]:
    order, length = sampler.order(0), len(sampler.instance_ids) // 4
    for number in itertools.count():
        inside = order.roll(-number * length // idea.window)[:length]
        inside = inside[torch.randperm(length, generator=randomness.generator(0, "window", number))]
        keys = view_keys(0, number, idea.views)
        yield from ((keys, ids) for ids in inside.split(idea.batch) if len(ids) == idea.batch)


def embed(encoder: nn.Module, heads: list[nn.Module], views: list[Tensor]) -> list[Tensor]:
    """By each of the heads."""
    with torch.autocast("cpu", torch.bfloat16):
        features = torch.cat([encoder(each) for each in views])
        return [F.normalize(head(features).float()) for head in heads]


def product(x: Tensor, rows: Tensor) -> Tensor:
    return (x.bfloat16() @ rows.bfloat16().T).float()


class Rows:
    """The classifier, written down plainly."""

    def __init__(self, idea: Idea, first: Tensor) -> None:
        self.idea, self.weight = idea, F.normalize(first).requires_grad_()
        self.velocity = torch.zeros_like(first)
        self.nearest: Tensor | None = None

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        idea, unit = self.idea, F.normalize(self.weight)
        if idea.negatives:
            others = torch.randint(len(unit), (idea.negatives,))
            compared = torch.cat([ids, others[~torch.isin(others, ids)]])
            return F.cross_entropy(x @ unit[compared].T / idea.temperature, torch.arange(len(ids)))
        if idea.fresh_positive:
            half = len(ids) // 2
            loss = self._fresh(x[:half], x[half:], ids[:half], unit) + self._fresh(x[half:], x[:half], ids[:half], unit)
            return loss / 2 + F.cross_entropy(product(x.detach(), unit) / idea.temperature, ids)
        logits = product(x, unit) / idea.temperature
        if idea.margin:
            logits = logits.scatter_add(1, ids[:, None], torch.full((len(ids), 1), -idea.margin / idea.temperature))
        own = logits.gather(1, ids[:, None])[:, 0]
        if self.nearest is not None:
            near = logits.gather(1, self.nearest[ids])
            own = (1 - idea.neighbors) * own + idea.neighbors * (self.shares[ids] * near).sum(1)
        loss = (torch.logsumexp(logits, 1) - own).mean()
        if idea.batch_negatives:
            others = (x @ x.T / idea.temperature).fill_diagonal_(-1e9)
            loss = loss + idea.batch_negatives * torch.logsumexp(others, 1).mean()
        return loss

    def _fresh(self, asks: Tensor, answers: Tensor, ids: Tensor, unit: Tensor) -> Tensor:
        others = product(asks, unit.detach()) / self.idea.temperature
        others[:, ids] = -1e9
        logits = torch.cat([asks @ answers.T / self.idea.temperature, others], 1)
        return F.cross_entropy(logits, torch.arange(len(ids)))

    @torch.no_grad()
    def search(self) -> None:
        unit, found = F.normalize(self.weight), []
        for part in torch.arange(len(unit)).split(1000):
            cosines = unit[part] @ unit.T
            cosines[torch.arange(len(part)), part] = -9
            found.append(cosines.topk(10, 1))
        self.nearest = torch.cat([each.indices for each in found])
        self.shares = F.softmax(torch.cat([each.values for each in found]) / 0.1, 1)

    @torch.no_grad()
    def update(self, factor: float) -> None:
        assert self.weight.grad is not None
        self.velocity.mul_(self.idea.row_momentum).add_(self.weight.grad).add_(self.weight, alpha=self.idea.row_decay)
        self.weight.sub_(self.velocity, alpha=self.idea.row_rate * factor)
        self.weight.grad = None


def pairs_loss(x: Tensor, idea: Idea) -> Tensor:
    logits = (x @ x.T / idea.temperature).fill_diagonal_(-torch.inf)
    pairs = torch.arange(len(x)).roll(len(x) // 2)
    if not idea.decoupled:
        return F.cross_entropy(logits, pairs)
    others = logits.scatter(1, pairs[:, None], -torch.inf)
    return (torch.logsumexp(others, 1) - logits.gather(1, pairs[:, None])[:, 0]).mean()


def _scaled(x: Tensor, weight: float) -> Tensor:
    """The same, with its gradient multiplied: the rows themselves learn as usual."""
    return weight * x + (1 - weight) * x.detach()


def measure(idea: Idea, dataset: Dataset, split: Split) -> dict:
    network, curve = build_network(idea), []
    sampler = Sampler(dataset.instance_ids, idea.batch, 0)
    per_epoch, num_steps = sampler.steps_per_epoch, idea.epochs * sampler.steps_per_epoch
    started = time.process_time()
    rows = None
    if idea.method == "rows":
        first = torch.zeros(len(dataset.manifest), idea.dim)
        with torch.no_grad():
            for images, ids in plain_batches(
                dataset.store, torch.cat(sampler.pass_over_all()), idea.size, idea.batch, CPU
            ):
                first[ids] = network(images)
        rows = Rows(idea, first)
    heads = [network[1]] + ([nn.Linear(network[0].feature_dim, idea.dim)] if idea.second_head else [])
    optimizer = build_optimizer(idea, nn.ModuleList([network[0], *heads]))
    for step, (views, ids) in enumerate(view_batches_of(idea, dataset, sampler, num_steps)):
        factor = learning_rate(step, num_steps, per_epoch, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = idea.lr * factor
        if rows is not None and idea.neighbors and step % per_epoch == 0 and step >= 0.3 * num_steps:
            rows.search()
        x, *others = embed(network[0], heads, views)
        loss = pairs_loss(x, idea) if rows is None else rows.loss(_scaled(x, idea.rows), ids)
        if idea.pairs:
            paired = (others[0] if others else x)[: idea.views * idea.batch]
            loss = loss + idea.pairs * pairs_loss(paired, idea)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rows is not None:
            rows.update(factor)
        if (step + 1) % per_epoch == 0:
            curve.append({"cpu_seconds": time.process_time() - started, "loss": float(loss.detach())})
            print(idea.changes, curve[-1], flush=True)
    features = extract_split(network[0], split, idea.size, CPU)
    return {
        "cpu_seconds": curve[-1]["cpu_seconds"],
        **dict(knn(*features)),
        **dict(linear(*features, 0)),
        "curve": curve,
    }


def table() -> str:
    lines = ["| what differs | views of an image | CPU seconds | k-NN, 200 | k-NN, 20 | linear |", "|---" * 6 + "|"]
    finished = [(idea, json.loads(idea.result.read_text())) for idea in IDEAS if idea.result.exists()]
    for idea, result in sorted(finished, key=lambda item: (item[0].set, -item[1]["knn_200"])):
        changes = {name: value for name, value in idea.changes.items() if name not in ("epochs", "views")}
        words = ", ".join(f"{name} {value}".replace("_", " ") for name, value in changes.items()) or "nothing"
        scores = " | ".join(f"{100 * result[score]:.1f}" for score in ("knn_200", "knn_20", "linear_top1"))
        lines.append(
            f"| {words} | {(idea.views + idea.crops) * idea.epochs} | {result['cpu_seconds']:.0f} | {scores} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("run", "table"))
    parser.add_argument("--data")
    parser.add_argument("--test-data")
    parser.add_argument("--set", choices=SIDES, default="cifar10", help="which set --data is")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), help="k n: each n-th idea, from the k-th", dest="turn"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    missing = (
        [idea for idea in IDEAS if idea.set == chosen.set and not idea.result.exists()][
            chosen.turn[0] :: chosen.turn[1]
        ]
        if chosen.part == "run"
        else []
    )
    if missing:
        dataset = open_dataset(chosen.data, max_images=IMAGES)
        split = labeled_split(dataset, open_test(chosen.data, chosen.test_data, None), 0, None)
        assert split is not None
    for idea in missing:
        result = measure(idea, dataset, split)
        about = {"idea": asdict(idea), "environment": json.loads(describe_environment(CPU))}
        write_whole(idea.result, json.dumps({**about, **result}, indent=1) + "\n")
    write_between_marks(DOCUMENT, "candidates", table())


if __name__ == "__main__":
    main()

"""Instance classification against its peers, by what they reach per CPU second.

    python benchmarks/peers.py cost --data cifar10/train                                    # CPU seconds of a step
    python benchmarks/peers.py view-cost --data cifar10/train                               # of one view
    python benchmarks/peers.py parts --data cifar10/train                                   # of a step of ours
    python benchmarks/peers.py tune --data cifar10/train --test-data cifar10/test           # seed 0
    python benchmarks/peers.py run --data cifar10/train --test-data cifar10/test            # seeds 1 to 3
    python benchmarks/peers.py tables                                                       # docs/experiments.md

The peers are lightly's (`peer_methods.py`): their losses, heads and values, on our encoder, views, order of images and
evaluation. A cell is (method, values, seed, set, images, epochs); one that is finished is kept in
`benchmarks/results/peers` and not run again. CPU seconds are those of training alone, on one thread.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import peer_tables
import torch
from lightly.transforms import SimCLRTransform
from peer_cells import METHODS, OURS, PRESETS, RESULTS, TUNING, Cell
from peer_methods import build_peer
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

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
from millionway.model.encoder import Encoder
from millionway.model.prior import PriorProgress, write_prior
from millionway.model.products import computed_in
from millionway.model.rows import rows_per_block
from millionway.model.schedule import learning_rate
from millionway.parallel.group import Group
from millionway.settings.pretrain import EncoderPrecision, Pretrain
from millionway.train.clock import Clock
from millionway.train.setup import build, resolve
from millionway.train.sizes import Sizes
from millionway.train.step import train_step

CPU = torch.device("cpu")
WARM_UP = 3  # steps that allocate and are not timed
VIEWS_IN_A_STEP = (64, 128, 256)
FEW = 3000  # images in the bank and as queries, along a run

Step = Callable[[Tensor, Tensor, float], Tensor]
"""(views, instance ids, learning rate from 0 to 1 of its peak) -> loss"""


class CpuClock:
    """CPU seconds of this process while it runs."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self.started = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.process_time() - self.started


@dataclass
class Run:
    """A cell that is being trained."""

    config: Pretrain
    encoder: Encoder
    sampler: Sampler
    step: Step
    dataset: Dataset
    warmup_epochs: float
    views_by: Literal["ours", "lightly"] = "ours"
    clock: Clock = field(default_factory=lambda: Clock(CPU))
    optimizer: torch.optim.Optimizer | None = None
    """of ours"""

    @property
    def num_steps(self) -> int:
        return self.config.training.epochs * self.sampler.steps_per_epoch

    @property
    def sizes(self) -> Sizes:
        return Sizes.of(self.config, self.sampler.steps_per_epoch)

    def steps(self) -> Iterator[Tensor]:
        """Train; one loss per step."""
        training, augmentation = self.config.training, self.config.augmentation
        per_epoch = self.sampler.steps_per_epoch

        def keys(step: int) -> list[int]:
            return view_keys(training.seed, step // per_epoch, augmentation.views)

        def ours() -> Iterator[tuple[Tensor, Tensor]]:
            for size, steps in self.sizes.parts(range(self.num_steps)):
                batches = ((keys(step), self.sampler.batch(step)) for step in steps)
                yield from view_batches(self.dataset.store, batches, size, CPU, **augmentation.of_a_view)

        made = ours() if self.views_by == "ours" else self._lightly_batches(self.encoder.spec.image_size)
        warmup = round(self.warmup_epochs * per_epoch)
        for number, (images, instance_ids) in enumerate(made):
            self.clock.lap("data")
            yield self.step(images, instance_ids, learning_rate(number, self.num_steps, warmup, 1.0))

    def _lightly_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The same images in each step; the encoder normalizes."""
        strength, blur = self.config.augmentation.jitter, self.config.augmentation.blur
        transform = SimCLRTransform(size, cj_strength=strength, gaussian_blur=blur, normalize=None)
        random.seed(self.config.training.seed)
        torch.manual_seed(self.config.training.seed)
        ids = torch.cat([self.sampler.batch(step) for step in range(self.num_steps)])
        for images, batch in plain_batches(self.dataset.store, ids, size, self.sampler.batch_size, CPU):
            first, second = zip(*(transform(to_pil_image(image)) for image in images))
            yield torch.stack([*first, *second]), batch.repeat(2)


def begin(cell: Cell, dataset: Dataset) -> Run:
    group = Group.current()
    config = resolve(cell.config, dataset, CPU, group)
    state, spec = build(config, dataset, CPU, group)
    training, method, network = config.training, config.classifier, state.network
    assert training.batch_size and training.lr and training.warmup_epochs is not None
    sampler = Sampler(dataset.instance_ids, training.batch_size, training.seed)
    if cell.method != OURS:
        values = cell.peer_values
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(randomness.key_of(cell.seed, "peer") >> 1)
            peer = build_peer(cell.method, network.encoder, values, cell.precision)

        def peer_step(views: Tensor, instance_ids: Tensor, factor: float) -> Tensor:
            return peer.step(*views.chunk(2), values.lr * factor)

        return Run(config, network.encoder, sampler, peer_step, dataset, values.warmup_epochs, values.views)

    peak, clock = training.lr, Clock(CPU)
    ids = torch.cat(sampler.pass_over_all())
    images = plain_batches(dataset.store, ids, spec.image_size, training.batch_size, CPU)
    norm = None if method.row_norm == "prior" else method.row_norm
    write_prior(method.prior, network, state.classifier, images, norm, PriorProgress())

    def step(views: Tensor, instance_ids: Tensor, factor: float) -> Tensor:
        return train_step(
            network,
            state.classifier,
            state.optimizer,
            views,
            instance_ids,
            None,
            alpha=0.0,
            lr=peak * factor,
            row_lr=peak * factor * method.row_lr,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            pairs=method.pairs or 0.0,
            num_classified=training.batch_size * (method.row_views or config.augmentation.views),
            clock=clock,
        ).loss

    network_of = (network.encoder, sampler, step, dataset, training.warmup_epochs)
    return Run(config, *network_of, clock=clock, optimizer=state.optimizer)


def measure(cell: Cell, dataset: Dataset, split: Split, few: Split | None) -> dict[str, Any]:
    clock, curve = CpuClock(), []
    with clock:
        run = begin(cell, dataset)
        steps = run.steps()
    size, loss = run.encoder.spec.image_size, torch.tensor(0.0)
    for epoch in range(1, cell.epochs + 1):
        with clock:
            for _ in range(run.sampler.steps_per_epoch):
                loss = next(steps)
        point = {"epoch": epoch, "cpu_seconds": clock.seconds, "loss": float(loss)}
        if few is not None:
            point |= dict(knn(*extract_split(run.encoder, few, size, CPU)))
        curve.append(point)
        print(cell.name, point, flush=True)
    features = extract_split(run.encoder, split, size, CPU)
    scores = {**dict(knn(*features)), **dict(linear(*features, cell.seed))}
    return {"cpu_seconds": clock.seconds, **scores, "curve": curve}


def run_cells(cells: list[Cell], data: str, test_data: str | None, with_curves: bool) -> None:
    """Those that are not finished yet, one at a time."""
    torch.set_num_threads(1)
    for cell in cells:
        if cell.result.exists():
            continue
        dataset = open_dataset(data, max_images=cell.images)
        test = open_test(data, test_data, None)
        split, few = (labeled_split(dataset, test, 0, num) for num in (None, FEW))
        assert split is not None, f"{data} has no labels"
        result = measure(cell, dataset, split, few if with_curves else None)
        about = {"cell": asdict(cell), "environment": json.loads(describe_environment(CPU))}
        cell.result.parent.mkdir(parents=True, exist_ok=True)
        write_whole(cell.result, json.dumps({**about, **result}, indent=1) + "\n")
        print(cell.name, {name: round(result[name], 4) for name in ("knn_200", "linear_top1", "cpu_seconds")})


def step_seconds(cells: dict[str, Cell], data: str, rounds: int) -> dict[str, tuple[Run, float]]:
    """CPU seconds of a step. Methods take turns step by step, so that neighbors on the machine slow all alike."""
    torch.set_num_threads(1)
    dataset = open_dataset(data, max_images=next(iter(cells.values())).images)
    runs = {name: begin(cell, dataset) for name, cell in cells.items()}
    steps = {name: run.steps() for name, run in runs.items()}
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + WARM_UP):
        for name in runs:
            started = time.process_time()
            next(steps[name])
            spent[name].append(time.process_time() - started)
    return {name: (run, statistics.median(spent[name][WARM_UP:])) for name, run in runs.items()}


def cost(cells: dict[str, Cell], data: str, rounds: int) -> dict[str, float]:
    """CPU seconds of an epoch, the mean over a run. Views that are smaller at first are measured at its end too."""
    at_the_end = {name: replace(cell, values={**cell.values, "first_size": "full"}) for name, cell in cells.items()}
    at_the_end = {f"{name}, at the end": cell for name, cell in at_the_end.items() if cell.method == OURS}
    found, seconds = step_seconds({**cells, **at_the_end}, data, rounds), {}
    for name in cells:
        run, step = found[name]
        shares = run.sizes.shares()
        if len(shares) > 1:
            step = shares[run.sizes.first] * step + shares[run.sizes.full] * found[f"{name}, at the end"][1]
        views = run.sampler.batch_size * run.config.augmentation.views
        print(f"{name}: {1000 * step:.1f} ms a step of {views} views, {1000 * step / views:.3f} a view")
        seconds[name] = step * run.sampler.steps_per_epoch
    return seconds


def parts(data: str, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of each part of a step of ours, for few images and for many; the encoder's without its optimizer."""
    torch.set_num_threads(1)
    found = []
    for images, name in ((10_000, "ours"), (50_000, "ours, many images")):
        cell = replace(METHODS[name], images=images, precision="bfloat16")
        run = begin(cell, open_dataset(data, max_images=images))
        assert run.optimizer is not None
        optimizer, moving, steps = run.optimizer, 0.0, run.steps()
        move = optimizer.step

        def timed(move: Callable[[], Any] = move) -> None:
            nonlocal moving
            started = time.perf_counter()
            move()
            moving += time.perf_counter() - started

        for _ in range(WARM_UP):
            next(steps)
        optimizer.step = timed
        for _ in range(rounds):
            run.clock.start(True)
            next(steps)
        seconds = {**run.clock.seconds, "optimizer": moving}
        seconds["encoder"] -= moving
        values = {"images": images, "batch_size": run.config.training.batch_size, "dim": run.config.model.dim}
        found.append({**values, "milliseconds": {part: 1000 * each / rounds for part, each in seconds.items()}})
        print(found[-1], flush=True)
    return found


def view_cost(data: str, images: int, rounds: int) -> list[dict[str, Any]]:
    """CPU seconds of one view by rows alone and of one of SimCLR's, with as many views in a step.

    Beside them what rows cannot do without, their matrix products.
    """
    found = []
    for precision, views in itertools.product(get_args(EncoderPrecision), VIEWS_IN_A_STEP):
        at: dict[str, Any] = {"images": images, "precision": precision}
        half = {**METHODS["SimCLR"].values, "batch_size": views // 2}
        cells = {"SimCLR": Cell("SimCLR", half, **at)}
        for dim in (128, 64):
            values = {**METHODS["ours, one view, SGD"].values, "batch_size": views, "dim": dim}
            cells[f"{dim} dimensions"] = Cell(OURS, values, **at)
        seconds = {name: step / views for name, (_, step) in step_seconds(cells, data, rounds).items()}
        for dim in (128, 64):
            seconds[f"products, {dim}"] = products(images, dim, views, getattr(torch, precision), rounds) / views
        found.append({"precision": precision, "views_in_a_step": views, "seconds_of_a_view": seconds})
        print(found[-1], flush=True)
    return found


def products(num: int, dim: int, batch: int, dtype: torch.dtype, rounds: int) -> float:
    """CPU seconds of the three of a step, in blocks and as the classifier computes them, and of nothing else."""
    block = rows_per_block(batch, CPU)
    rows, x = torch.randn(num, dim).to(dtype).split(block), torch.randn(batch, dim).to(dtype)
    logits, gradient, sums = x.new_empty(block, batch), x.new_empty(block, dim), torch.zeros_like(x)
    spent = []
    for _ in range(rounds + WARM_UP):
        started = time.process_time()
        with computed_in("float32"):
            for each in rows:
                part = torch.mm(each, x.T, out=logits[: len(each)])
                sums.addmm_(part.T, each)
            for each in rows:
                torch.mm(logits[: len(each)], x, out=gradient[: len(each)])
        spent.append(time.process_time() - started)
    return statistics.median(spent[WARM_UP:])


def epochs_of(name: str, like: str, epochs: int, at: dict[str, Any]) -> int:
    """As many as take the CPU seconds of `epochs` of another method."""
    seconds = json.loads(Cell(name, **at).cost.read_text())["seconds_of_an_epoch"]
    return max(1, round(epochs * seconds[like] / seconds[name]))


def where(chosen: argparse.Namespace) -> dict[str, Any]:
    return {"images": chosen.images, "set": chosen.set, "precision": chosen.precision}


def comparison(chosen: argparse.Namespace) -> list[Cell]:
    """Equal CPU seconds for every seed; then equal views, SimCLR with as many steps, once with views by lightly."""
    at = where(chosen)
    equal = {name: epochs_of(name, "SimCLR", chosen.epochs, at) for name in chosen.methods}
    cells = [
        Cell(METHODS[name].method, METHODS[name].values, seed, epochs=equal[name], **at)
        for seed in chosen.seeds
        for name in chosen.methods
    ]
    if chosen.seconds_only:
        return cells
    ours = next((METHODS[name].values for name in chosen.methods if METHODS[name].method == OURS), None)
    for seed in chosen.seeds if ours else []:
        cells.append(Cell(OURS, ours, seed, epochs=2 * chosen.epochs // ours["views"], **at))
        half = {**METHODS["SimCLR"].values, "batch_size": METHODS["SimCLR"].values["batch_size"] // 2}
        cells.append(Cell("SimCLR", half, seed, epochs=chosen.epochs, **at))
    theirs = {**METHODS["SimCLR"].values, "views": "lightly"}
    return [*cells, Cell("SimCLR", theirs, chosen.seeds[0], epochs=chosen.epochs, **at)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("cost", "view-cost", "parts", "tune", "run", "tables"))
    parser.add_argument("--data")
    parser.add_argument("--test-data")
    parser.add_argument("--set", choices=PRESETS, default="cifar10", help="which set --data is")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16", help="of the encoder")
    parser.add_argument("--epochs", type=int, default=10, help="of SimCLR; the others take its CPU seconds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seconds-only", action="store_true", help="run: nothing but the comparison at equal seconds")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each method that are timed")
    chosen = parser.parse_args()
    if chosen.part == "tables":
        peer_tables.write()
        return
    if chosen.data is None:
        parser.error("--data says where the images are")
    environment = json.loads(describe_environment(CPU))
    if chosen.part == "view-cost":
        steps = view_cost(chosen.data, chosen.images, chosen.rounds)
        found = {"images": chosen.images, "steps": steps, "environment": environment}
        (RESULTS / f"view_cost_{chosen.images}.json").write_text(json.dumps(found, indent=1) + "\n")
    elif chosen.part == "parts":
        found = {"steps": parts(chosen.data, chosen.rounds), "environment": environment}
        (RESULTS / "step_parts.json").write_text(json.dumps(found, indent=1) + "\n")
    elif chosen.part == "cost":
        cells = {name: replace(METHODS[name], **where(chosen)) for name in chosen.methods}
        found = {"seconds_of_an_epoch": cost(cells, chosen.data, chosen.rounds), "environment": environment}
        cells["SimCLR"].cost.write_text(json.dumps(found, indent=1) + "\n")
    else:
        tried = [cell for cell in TUNING if cell.set == chosen.set]
        cells = tried if chosen.part == "tune" else comparison(chosen)
        run_cells(cells, chosen.data, chosen.test_data, with_curves=chosen.part == "run")


if __name__ == "__main__":
    main()

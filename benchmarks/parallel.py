"""Rows shared out over the ranks against rows replicated on each: time, memory, and how many instances fit.

    python benchmarks/parallel.py steps --ranks 2 --instances 131072
    python benchmarks/parallel.py steps --ranks 4 --instances 131072
    python benchmarks/parallel.py steps --ranks 2 --instances 1281167
    python benchmarks/parallel.py alone --instances 131072        # two ranks of one core against one rank of two
    python benchmarks/parallel.py largest --ranks 2 --limits-gib 1.5 2 3 4
    python benchmarks/parallel.py table

Processes are started by torchrun and talk by gloo over loopback; the cores are divided among them. "Replicated" is
DistributedDataParallel around encoder, head and all rows: normalize, matmul, cross_entropy, autograd, torch.optim.SGD.
Both sides have the same encoder (narrow-resnet, 16 px) and the same batch of 256 images, two views of each. A time is
the slowest rank's. Memory is the peak of a rank above that of the same process with the encoder alone.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from classifier import RESULTS, memory_status, table_of  # beside this file
from max_classes import largest, run_within
from presets import write_between_marks

from millionway.machine import describe_environment, num_cores
from millionway.model.classifier import InstanceClassifier
from millionway.model.encoder import EncoderSpec, build_encoder
from millionway.model.head import build_head
from millionway.model.network import Network
from millionway.parallel import collectives
from millionway.parallel.group import Group, leave
from millionway.settings.pretrain import IMAGENET_MEAN, IMAGENET_STD
from millionway.train.step import train_step

IMAGES, DIM, TAU, K, SIZE = 256, 128, 0.15, 100, 16
GIB = 1 << 30
DOCS = Path(__file__).parent.parent / "docs"


# --- on the ranks -----------------------------------------------------------------------------------------------------


def network_of() -> Network:
    encoder = build_encoder(EncoderSpec("narrow-resnet", "small", SIZE, IMAGENET_MEAN, IMAGENET_STD), 0)
    return Network(encoder, build_head("mlp", encoder.feature_dim, DIM, 0))


def own_batch(group: Group, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(group.rank)
    images = torch.rand(2 * IMAGES // group.size, 3, SIZE, SIZE, generator=g)
    return images, torch.randint(num, (IMAGES // group.size,), generator=g).repeat(2)


def hybrid(group: Group, num: int, keep: bool) -> Callable[[], None]:
    network = network_of()
    classifier = InstanceClassifier(num, DIM, TAU, group, keep_bytes=None if keep else 0)
    start, stop = classifier.local_range
    table = table_of(num, start, stop)
    optimizer = torch.optim.SGD(network.parameters(), 0.01, 0.9, weight_decay=1e-4)
    views, ids = own_batch(group, num)
    parallel = group.data_parallel(network)

    def step() -> None:
        train_step(
            parallel,
            classifier,
            optimizer,
            views,
            ids,
            table,
            alpha=0.2,
            lr=0.01,
            row_lr=0.01,
            momentum=0.9,
            weight_decay=1e-4,
        )

    return step


class Replicated(torch.nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.network = network_of()
        self.rows = torch.nn.Parameter(torch.randn(num, DIM))

    def forward(self, views: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.normalize(self.network(views)) @ F.normalize(self.rows).T / TAU, ids)


def replicated(group: Group, num: int) -> Callable[[], None]:
    module = Replicated(num)
    parallel = group.data_parallel(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.01, 0.9, weight_decay=1e-4)
    views, ids = own_batch(group, num)

    def step() -> None:
        loss = parallel(views, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def rows_only(group: Group, num: int) -> Callable[[], None]:
    """The classifier's part of a step, exponentials computed again."""
    classifier = InstanceClassifier(num, DIM, TAU, group, keep_bytes=0)
    table = table_of(num, *classifier.local_range)
    g = torch.Generator().manual_seed(group.rank)
    x = torch.randn(2 * IMAGES // group.size, DIM, generator=g)
    ids = torch.randint(num, (IMAGES // group.size,), generator=g).repeat(2)

    def step() -> None:
        classifier(x.clone().requires_grad_(), ids, table, 0.2).backward()
        classifier.update(0.01)

    return step


def encoder_only(group: Group) -> Callable[[], None]:
    network = network_of()
    optimizer = torch.optim.SGD(network.parameters(), 0.01, 0.9, weight_decay=1e-4)
    parallel = group.data_parallel(network)
    views, _ = own_batch(group, IMAGES)

    def step() -> None:
        loss = parallel(views).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def on_rank(sides: list[str], num: int, turns: int, threads: int) -> None:
    """Print {side: {seconds, peak}} of the slowest and of the fullest rank."""
    torch.set_num_threads(threads)
    group = Group.current(timeout=600)
    make = {
        "hybrid": lambda: hybrid(group, num, keep=False),
        "hybrid, keeping": lambda: hybrid(group, num, keep=True),
        "replicated": lambda: replicated(group, num),
        "rows": lambda: rows_only(group, num),
        "encoder": lambda: encoder_only(group),
    }
    steps = {side: make[side]() for side in sides}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(turns + 1):
        for side, step in steps.items():
            collectives.all_gather_object(group, None)
            started = time.perf_counter()
            step()
            took = max(collectives.all_gather_object(group, time.perf_counter() - started))
            if turn:
                seconds[side].append(took)
    peak = max(collectives.all_gather_object(group, memory_status("VmHWM")))
    if group.is_first:
        print(json.dumps({"seconds": seconds, "peak_rss_bytes": peak}), flush=True)
    leave()


# --- the launcher -----------------------------------------------------------------------------------------------------


def launch(ranks: int, sides: list[str], num: int, turns: int, limit: int | None = None) -> dict | None:
    """The result, or None if it did not fit into the limit."""
    threads = max(1, num_cores() // ranks)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    command += ["rank", "--instances", str(num), "--turns", str(turns), "--threads", str(threads), "--sides", *sides]
    printed = run_within(limit, command)
    return None if printed is None else json.loads(printed.splitlines()[-1])


def fully(ranks: int, sides: list[str], num: int, turns: int) -> dict:
    result = launch(ranks, sides, num, turns)
    assert result is not None
    return result


def steps_at(ranks: int, num: int, turns: int) -> dict:
    together = fully(ranks, ["hybrid", "hybrid, keeping", "replicated"], num, turns)["seconds"]
    median = {side: statistics.median(values) for side, values in together.items()}
    base = fully(ranks, ["encoder"], num, 2)["peak_rss_bytes"]
    beyond = {side: fully(ranks, [side], num, 2)["peak_rss_bytes"] - base for side in ("hybrid", "replicated")}
    return {
        "ranks": ranks,
        "num_instances": num,
        "seconds": together,
        "beyond_encoder_bytes": beyond,
        "memory, hybrid / replicated": beyond["hybrid"] / beyond["replicated"],
        "step time, hybrid / replicated": median["hybrid"] / median["replicated"],
        "step time, hybrid keeping / replicated": median["hybrid, keeping"] / median["replicated"],
    }


def alone_at(num: int, turns: int) -> dict:
    """Alternating launches: the two cannot run in one process group."""
    seconds: dict[str, list[float]] = {"1": [], "2": []}
    for _ in range(3):
        for ranks in (1, 2):
            seconds[str(ranks)] += fully(ranks, ["rows"], num, turns)["seconds"]["rows"]
    ratio = statistics.median(seconds["2"]) / statistics.median(seconds["1"])
    return {"num_instances": num, "seconds": seconds, "classifier step, 2 ranks / 1 rank": ratio}


# --- what it says -----------------------------------------------------------------------------------------------------


def results(kind: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"parallel_{kind}_*.json"))]


def table() -> str:
    steps = sorted(results("steps"), key=lambda part: (part["num_instances"], part["ranks"]))
    heads = [f"N = {part['num_instances']:,}, {part['ranks']} ranks" for part in steps]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(steps) + 1) + "|"]
    for side in ("replicated", "hybrid"):
        cells = [f"{part['beyond_encoder_bytes'][side] / GIB:.2f} GiB" for part in steps]
        lines.append(f"| memory of a rank beyond the encoder, {side} | " + " | ".join(cells) + " |")
    for side in ("replicated", "hybrid", "hybrid, keeping"):
        cells = [f"{statistics.median(part['seconds'][side]):.2f} s" for part in steps]
        lines.append(f"| a step, {side} | " + " | ".join(cells) + " |")
    for name in [name for name in (steps[0] if steps else {}) if " / " in name]:
        lines.append(f"| {name} | " + " | ".join(f"{part[name]:.2f}" for part in steps) + " |")
    for part in results("alone"):
        name = "classifier step, 2 ranks / 1 rank"
        lines += ["", f"{name} on the same 2 cores, N = {part['num_instances']:,}: {part[name]:.2f}."]
    for part in results("largest"):
        lines += ["", "| memory limit of a rank | largest N, replicated | largest N, hybrid | hybrid / replicated |"]
        lines.append("|---|---|---|---|")
        for limit, pair in part["largest"].items():
            ratio = pair["hybrid"] / pair["replicated"]
            lines.append(f"| {limit} GiB | {pair['replicated']:,} | {pair['hybrid']:,} | {ratio:.1f} |")
        draw(part)
    commits = sorted(
        {part["environment"]["commit"] for kind in ("steps", "alone", "largest") for part in results(kind)}
    )
    return "\n".join([*lines, "", f"Commits {', '.join(commits)}."])


def draw(part: dict) -> None:
    """The paper's Figure 3: the largest N against the memory of a device."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5.5, 3.5), layout="constrained")
    limits = [float(limit) for limit in part["largest"]]
    for side, color in (("hybrid", "#1f6f8b"), ("replicated", "#c8553d")):
        counts = [pair[side] / 1e6 for pair in part["largest"].values()]
        axes.plot(limits, counts, "o-", color=color)
        axes.annotate(
            side, (limits[-1], counts[-1]), xytext=(6, 0), textcoords="offset points", color=color, va="center"
        )
    axes.set_xlabel(f"memory limit of each of {part['ranks']} ranks, GiB")
    axes.set_ylabel("largest N, millions")
    axes.set_xlim(0, 1.25 * limits[-1])
    axes.set_ylim(0, None)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(DOCS / "largest_n.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("steps", "alone", "largest", "table", "rank"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--instances", type=int, default=131_072)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--limits-gib", type=float, nargs="+", default=[1.5, 2, 3, 4])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sides", nargs="+", default=["hybrid"])
    chosen = parser.parse_args()
    if chosen.part == "rank":
        on_rank(chosen.sides, chosen.instances, chosen.turns, chosen.threads)
        return
    environment = {"environment": json.loads(describe_environment(torch.device("cpu")))}
    if chosen.part == "steps":
        result = steps_at(chosen.ranks, chosen.instances, chosen.turns)
        name = f"steps_{chosen.instances}_{chosen.ranks}"
    elif chosen.part == "alone":
        result, name = alone_at(chosen.instances, chosen.turns), f"alone_{chosen.instances}"
    elif chosen.part == "largest":
        pairs = {}
        for limit in chosen.limits_gib:
            pairs[f"{limit:g}"] = {}
            for side in ("replicated", "hybrid"):
                print(f"{side} within {limit:g} GiB", file=sys.stderr)
                result_of = functools.partial(launch, chosen.ranks, [side], turns=1, limit=int(limit * GIB))
                pairs[f"{limit:g}"][side], _ = largest(result_of, 1 << 15)
        result, name = {"ranks": chosen.ranks, "largest": pairs}, f"largest_{chosen.ranks}"
    if chosen.part != "table":
        (RESULTS / f"parallel_{name}.json").write_text(json.dumps({**result, **environment}, indent=2) + "\n")
    write_between_marks(DOCS / "experiments.md", "parallel", table())
    print(table())


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "agg")
    main()

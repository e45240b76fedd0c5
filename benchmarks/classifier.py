"""How near is a step of the classifier to the matrix products it cannot do without, and to what else there is?

    python benchmarks/classifier.py steps --instances 131072 1281167
    python benchmarks/classifier.py hardest --instances 131072
    python benchmarks/classifier.py hardest --instances 1281167 --share 0.0143 --repeats 3

    python benchmarks/classifier.py table      # rewrite the table in docs/experiments.md from the results

Sides, alternating in one run, all on the same rows and batch:
  bound          the three matrix products as torch computes them, blocked as ours, and nothing else
  own bound      the same products as ours computes them (`model/products.py`)
  ours, keeping  smoothed labels (K = 100, alpha = 0.2), exponentials kept: loss, embedding gradient, update of the rows
  ours, again    the same, exponentials computed again
  ours, bfloat16 the same as again, rows and momentum stored in bfloat16
  plain PyTorch  normalize, matmul, / tau, cross_entropy, autograd, torch.optim.SGD; labels not smoothed
  plain, folded  the same with 1 / tau multiplied into the embeddings, which spares two passes over the logits
  linear_cross_entropy   torch's, with the best chunk of a few tried, and torch.optim.SGD; labels not smoothed
Hardest classes: our exact search, one of 25 lines (blocked product, running top-k; float32 decides) and faiss-cpu's,
on rows in clusters, as after some training, and on rows that are nearly collapsed (mean cosine 0.999).
"""

import argparse
import ctypes
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from presets import write_between_marks  # beside this file
from timing import alternate

from millionway.machine import describe_environment
from millionway.model import threads
from millionway.model.classifier import InstanceClassifier
from millionway.model.hardest import top_k
from millionway.model.products import computed_in
from millionway.model.rows import Block, Rows, rows_per_block

RESULTS = Path(__file__).parent / "results"
BATCH, DIM, TAU, K, ALPHA = 512, 128, 0.15, 100, 0.2
OURS = ("ours, keeping", "ours, again")
MOST_WITH_BFLOAT16 = 1 << 20  # with more, all sides together do not fit into 24 GiB


def batch_of(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of 256 instances, as in training."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH // 2, DIM, generator=g)
    x = torch.cat([x, x + 0.3 * torch.randn(x.shape, generator=g)])
    return x, torch.randint(num, (BATCH // 2,), generator=g).repeat(2)


def table_of(num: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """A table of hardest classes with the right shape and scatter; which they are does not change the time."""
    g = torch.Generator().manual_seed(1)
    stop = num if stop is None else stop
    table = torch.empty(stop - start, K, dtype=torch.int32)
    for part, own in zip(table.split(1 << 14), torch.arange(start, stop).split(1 << 14)):
        steps = torch.randint(1, num // K, part.shape, generator=g)
        part.copy_((steps.cumsum(1) + own[:, None]) % num)
    return table


def ours(num: int, keep_bytes: int, table: torch.Tensor, storage: torch.dtype = torch.float32) -> Callable[[], None]:
    classifier = InstanceClassifier(num, DIM, TAU, storage=storage, keep_bytes=keep_bytes)
    x, ids = batch_of(num)

    def step() -> None:
        leaf = x.clone().requires_grad_()
        classifier(leaf, ids, table, ALPHA).backward()
        classifier.update(0.01)

    return step


def bounds(num: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """(bound, own bound), on the same rows"""
    x = F.normalize(batch_of(num)[0])
    block = rows_per_block(BATCH, x.device)
    weight = F.normalize(torch.randn(num, DIM))
    rows = Rows(weight, weight, torch.ones(num, 1), block)  # the bound writes nothing
    kept = [torch.empty(len(each), BATCH) for each in rows.blocks()]

    def first(run: list[Block]) -> None:
        o = torch.zeros(BATCH, DIM)
        for each in run:
            torch.mm(each.weight, x.T, out=kept[each.number])
            o.addmm_(kept[each.number].T, each.weight)

    def second(run: list[Block]) -> None:
        gradient = torch.empty(block, DIM)
        for each in run:
            torch.mm(kept[each.number], x, out=gradient[: len(each)])

    def step() -> None:
        threads.on_each(first, rows.runs(), x.device)
        threads.on_each(second, rows.runs(), x.device)

    def own() -> None:
        with computed_in("float32"):
            step()

    return step, own


class Autograd:
    """What PyTorch has, on one set of rows, since several do not fit beside each other."""

    def __init__(self, num: int) -> None:
        self.rows = torch.randn(num, DIM).requires_grad_()
        self.optimizer = torch.optim.SGD([self.rows], lr=0.01, momentum=0.9, weight_decay=1e-4)
        self.x, self.ids = batch_of(num)

    def step(self, loss_of: Callable[..., torch.Tensor]) -> None:
        leaf = self.x.clone().requires_grad_()
        self.optimizer.zero_grad()
        loss_of(F.normalize(leaf), F.normalize(self.rows), self.ids).backward()
        self.optimizer.step()

    def plain(self) -> None:
        self.step(lambda x, rows, ids: F.cross_entropy(x @ rows.T / TAU, ids))

    def folded(self) -> None:
        self.step(lambda x, rows, ids: F.cross_entropy((x / TAU) @ rows.T, ids))

    def fused(self, chunk: int) -> None:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
        self.step(lambda x, rows, ids: F.linear_cross_entropy(x / TAU, rows, ids, options=options))


def steps_at(num: int, repeats: int) -> dict:
    table = table_of(num)
    few = Autograd(131_072)
    tried = alternate({str(chunk): partial(few.fused, chunk) for chunk in (64, 128, 256, 512)}, 2)
    best_chunk = int(min(tried, key=lambda chunk: min(tried[chunk])))
    torchs = Autograd(num)
    plain_bound, own_bound = bounds(num)
    sides = {
        "bound": plain_bound,
        "own bound": own_bound,
        "ours, keeping": ours(num, 1 << 40, table),
        "ours, again": ours(num, 0, table),
        "plain PyTorch": torchs.plain,
        "plain, folded": torchs.folded,
        "linear_cross_entropy": partial(torchs.fused, best_chunk),
    }
    if num <= MOST_WITH_BFLOAT16:
        sides["ours, bfloat16"] = ours(num, 0, table, torch.bfloat16)
    seconds = alternate(sides, repeats)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    with_bfloat16 = {}
    if "ours, bfloat16" in sides:
        with_bfloat16["bfloat16 / again"] = median["ours, bfloat16"] / median["ours, again"]
    return {
        "num_instances": num,
        "linear_cross_entropy_chunk": best_chunk,
        "seconds": seconds,
        "keeping / bound": median["ours, keeping"] / median["bound"],
        "again / bound": median["ours, again"] / median["bound"],
        "keeping / own bound": median["ours, keeping"] / median["own bound"],
        "again / own bound": median["ours, again"] / median["own bound"],
        **with_bfloat16,
        "plain / keeping": median["plain PyTorch"] / median["ours, keeping"],
        "plain / again": median["plain PyTorch"] / median["ours, again"],
        "plain, folded / keeping": median["plain, folded"] / median["ours, keeping"],
        "plain, folded / again": median["plain, folded"] / median["ours, again"],
        "linear_cross_entropy / again": median["linear_cross_entropy"] / median["ours, again"],
    }


def memory_beyond_rows(num: int) -> int:
    """Peak of the resident memory during steps above what rows, momentum, norms and table take, in bytes."""
    step = ours(num, 0, table_of(num))
    return memory_beyond(lambda: [step() for _ in range(3)])


def memory_beyond(work: Callable[[], object]) -> int:
    """Peak of the resident memory above what is there before, in bytes."""
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that is still resident would hide what is taken
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = memory_status("VmRSS")
    work()
    return memory_status("VmHWM") - before


def memory_status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def clustered(num: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    centers = torch.randn(num // 16, DIM, generator=g)
    return centers[torch.randint(len(centers), (num,), generator=g)] + torch.randn(num, DIM, generator=g)


def collapsed(num: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return F.normalize(torch.randn(DIM, generator=g), dim=0) + 0.001**0.5 * F.normalize(
        torch.randn(num, DIM, generator=g)
    )


class Enough(Exception):
    pass


def up_to(share: float) -> Callable[[Iterable, int, str], Iterator]:
    """A progress bar for `hardest` that ends it after this share of its work."""

    def progress(items: Iterable, num: int, words: str) -> Iterator:
        for number, item in enumerate(items):
            if number >= share * num:
                raise Enough
            yield item

    return progress


def ours_top_k(classifier: InstanceClassifier, share: float) -> torch.Tensor | None:
    if share == 1:
        return classifier.hardest(K)
    with suppress(Enough):
        top_k(classifier.weight, K, classifier.alive, progress=up_to(share))
    return None


def plain_top_k(rows: torch.Tensor, k: int, num_queries: int) -> torch.Tensor:
    """Blocked product and running top-k, of the first rows."""
    unit = F.normalize(rows)

    def of_block(start: int) -> torch.Tensor:
        queries = unit[start : min(start + 1024, num_queries)]
        best, ids = queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
        for at, keys in zip(range(0, len(unit), 4096), unit.split(4096)):
            cosines = queries @ keys.T
            own = torch.arange(start, start + len(queries)) - at
            here = ((own >= 0) & (own < len(keys))).nonzero()[:, 0]
            cosines[here, own[here]] = -torch.inf
            best, places = torch.cat([best, cosines], dim=1).topk(min(k, len(unit) - 1), dim=1)
            everybody = torch.cat([ids, torch.arange(at, at + len(keys)).expand(len(queries), -1)], dim=1)
            ids = everybody.gather(1, places)
        return ids.to(torch.int32)

    return torch.cat(threads.on_each(of_block, range(0, num_queries, 1024), unit.device))


def hardest_at(num: int, repeats: int, share: float) -> dict:
    """share: how much of the whole search each side does: its first queries, or the first of its blocks."""
    import faiss

    num_queries = math.ceil(share * num)

    faiss.omp_set_num_threads(torch.get_num_threads())

    def search(rows: torch.Tensor) -> object:
        unit = F.normalize(rows).numpy()
        index = faiss.IndexFlatIP(DIM)
        index.add(unit)
        return index.search(unit[:num_queries], K + 1)

    classifiers = {}
    for kind, rows in (("clustered", clustered(num)), ("collapsed", collapsed(num))):
        classifiers[kind] = InstanceClassifier(num, DIM)
        classifiers[kind].set_rows(torch.arange(num), rows)
    rows = classifiers["clustered"].weight
    tables: dict[str, torch.Tensor | None] = {}
    sides = {
        "faiss": lambda: search(rows),
        "plain": lambda: tables.update(plain=plain_top_k(rows, K, num_queries)),
        "ours": lambda: tables.update(ours=ours_top_k(classifiers["clustered"], share)),
        "ours, collapsed": lambda: ours_top_k(classifiers["collapsed"], share),
    }
    beyond = memory_beyond(sides["ours"]) - (4 * K * num if share == 1 else 0)
    seconds = alternate(sides, repeats, warm_up=0)  # they take half a minute each
    median = {name: statistics.median(values) for name, values in seconds.items()}
    result = {
        "num_instances": num,
        "k": K,
        "share of the search": share,
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "faiss / ours": median["faiss"] / median["ours"],
        "plain / ours": median["plain"] / median["ours"],
        "ours, collapsed / clustered": median["ours, collapsed"] / median["ours"],
        "memory beyond rows and the table (MiB)": beyond / 2**20,
    }
    if share == 1:
        result["entries in which plain agrees"] = float((tables["plain"] == tables["ours"]).float().mean())
    return result


def table() -> str:
    """All results that are there, one column for each."""
    parts = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("classifier_*.json"))]
    parts.sort(key=lambda part: ("k" in part, part["num_instances"]))
    names = list(dict.fromkeys(name for part in parts for name in part if " / " in name or "MiB" in name))
    heads = [f"{'hardest(100)' if 'k' in part else 'step'}, N = {part['num_instances']:,}" for part in parts]
    lines = ["| figure | " + " | ".join(heads) + " |", "|---" * (len(parts) + 1) + "|"]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(f"{part[name]:.2f}" if name in part else "" for part in parts) + " |")
    steps = [part for part in parts if "k" not in part]
    growth = [
        statistics.median(steps[-1]["seconds"][side]) / statistics.median(steps[0]["seconds"][side]) for side in OURS
    ]
    times = steps[-1]["num_instances"] / steps[0]["num_instances"]
    lines += [
        "",
        f"{times:.2f} times the instances take {growth[0]:.2f} (keeping) and {growth[1]:.2f} (again) times as long.",
    ]
    about = parts[0]["environment"]
    lines += ["", f"Batch {BATCH}, {DIM} dimensions, {about['cores']} cores of an {about['cpu']} processor, torch"]
    lines[-1] += (
        f" {about['versions']['torch']}, commits {', '.join(sorted({p['environment']['commit'] for p in parts}))}."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("steps", "hardest", "table"))
    parser.add_argument("--instances", type=int, nargs="+", default=[131_072])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--share", type=float, default=1, help="of the search for the hardest, on each side")
    chosen = parser.parse_args()
    environment = json.loads(describe_environment(torch.device("cpu")))  # as it begins
    for num in chosen.instances if chosen.part != "table" else []:
        if chosen.part == "steps":
            memory = memory_beyond_rows(num) / 2**20
            result = {**steps_at(num, chosen.repeats), "memory beyond rows, again (MiB)": memory}
        else:
            result = hardest_at(num, chosen.repeats, chosen.share)
        result["environment"] = environment
        path = RESULTS / f"classifier_{chosen.part}_{num}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
    write_between_marks(RESULTS.parent.parent / "docs" / "experiments.md", "classifier", table())
    print(table())


if __name__ == "__main__":
    main()

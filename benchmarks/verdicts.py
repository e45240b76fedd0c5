"""Does the verdict tell the truth? Runs whose state is known, and what it says of each; writes the table of the docs.

    python benchmarks/verdicts.py run                # runs what benchmarks/results/verdicts does not hold yet
    python benchmarks/verdicts.py run --photos DIR   # also the two runs on photos
    python benchmarks/verdicts.py table              # judges the stored runs again

How a state is known: bugs and settings are put in on purpose; whether more epochs help is seen in another run of twice
as many (by how many fresh views find their image); a run looked at early is a long run's beginning.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "verdicts"
DIGITS = {"preset": "digits", "max_images": 320, "batch_size": 32, "lr": 0.03, "threads": 1, "seed": 1}
KEPT = ("kind", "step", "epoch", "loss", "batch_top1", "lr", "num_images", "instance_top1", "effective_rank")
KEPT += ("positive_cosine", "hardest_negative_cosine", "knn_20")
KEPT += ("small_views", "full_instance_top1", "full_effective_rank")  # what the verdict compares by, besides
HELPS = 0.03  # share of fresh views that a run of twice the epochs gains; less is not worth the time


@dataclass(frozen=True)
class Run:
    """Settings laid over those of the digits, and what is wrong with it on purpose."""

    settings: dict[str, Any] = field(default_factory=dict)
    bug: str = ""
    images: tuple[int, int] | None = None
    """so many files at first, so many from the middle of the run on"""
    photos: bool = False


@dataclass(frozen=True)
class Case:
    state: str
    run: str
    right: tuple[str, ...]
    """the words that are true of it; empty: those that a run of twice the epochs shows to be"""
    until: float | None = None
    """looked at after this epoch, as if the run were still going on"""


LENGTHS = (5, 10, 20, 40, 80, 160, 320)
RUNS = {f"{n} epochs": Run({"epochs": n, "eval_every": max(1, n // 10)}) for n in LENGTHS}
RUNS |= {f"{n} epochs, 100 images": Run({"epochs": n, "eval_every": n // 10, "max_images": 100}) for n in (160, 320)}
RUNS |= {
    "all digits": Run({"epochs": 6, "eval_every": 1, "max_images": None, "batch_size": 128, "lr": 0.06}),
    "linear head": Run({"epochs": 20, "eval_every": 2, "head": "linear", "smoothing": 0.0, "temperature": 0.1}),
    "random rows": Run({"epochs": 20, "eval_every": 2, "prior": "random"}),
    "sampled classes": Run({"epochs": 20, "eval_every": 2, "smoothing": 0.0, "classes_per_step": 64}),
    "rate 30": Run({"epochs": 10, "eval_every": 1, "lr": 30.0, "warmup_epochs": 0}),
    "rate 3": Run({"epochs": 20, "eval_every": 2, "lr": 3.0, "warmup_epochs": 0}),
    "rows' rate 10,000": Run({"epochs": 20, "eval_every": 2, "row_lr": 10_000.0}),
    "rate 0.000001": Run({"epochs": 20, "eval_every": 2, "lr": 1e-6}),
    "rate 0.00001": Run({"epochs": 40, "eval_every": 4, "lr": 1e-5}),
    "encoder climbs": Run({"epochs": 20, "eval_every": 2}, bug="climbs"),
    "wrong image ids": Run({"epochs": 20, "eval_every": 2}, bug="wrong ids"),
    "constant embedding": Run({"epochs": 20, "eval_every": 2}, bug="constant"),
    "weight decay 2": Run({"epochs": 20, "eval_every": 2, "weight_decay": 2.0}),
    "features of rank 1": Run({"epochs": 20, "eval_every": 2}, bug="rank 1"),
    "the same views again": Run(
        {"epochs": 60, "eval_every": 6, "max_images": 50, "batch_size": 10, "crop_min": 0.08}, bug="same views"
    ),
    "the same views again, 320": Run({"epochs": 80, "eval_every": 8, "crop_min": 0.08}, bug="same views"),
    "images 125 to 225": Run({"epochs": 40, "eval_every": 4, "batch_size": 25}, images=(125, 225)),
    "images 225 to 125": Run({"epochs": 40, "eval_every": 4, "batch_size": 25}, images=(225, 125)),
    "images 50 to 450": Run({"epochs": 40, "eval_every": 4, "batch_size": 25}, images=(50, 450)),
    "photos": Run({"epochs": 10, "eval_every": 1, "batch_size": 16, "lr": 0.03}, photos=True),
    "photos, rate 0.000001": Run({"epochs": 4, "eval_every": 1, "batch_size": 16, "lr": 1e-6}, photos=True),
}
HARMED = ("learning rate too high", "collapsed")
GOES_ON = ("learning", "still improving")
BY_LABELS = ("what labels say",)
EARLY = ("too early", "learning")
CASES = [
    *(Case("finished", f"{n} epochs", ()) for n in LENGTHS[:-1]),
    Case("finished", "160 epochs, 100 images", ()),
    *(Case("healthy, half-way", f"{n} epochs", ("learning",), n / 2) for n in (20, 40, 80)),
    Case("converged: twice as long as a run to which that brought little", "320 epochs", ("no longer improving",)),
    Case("healthy", "all digits", GOES_ON),
    Case("healthy", "linear head", GOES_ON),
    Case("healthy", "random rows", GOES_ON),
    Case("healthy", "sampled classes", GOES_ON),
    Case("healthy", "photos", GOES_ON),
    Case("looked at too early", "80 epochs", ("too early",), 0),
    Case("looked at too early", "160 epochs", ("too early",), 0),
    Case("looked at too early", "320 epochs", EARLY, 32),
    Case("looked at early", "80 epochs", EARLY, 8),
    Case("rate too high", "rate 30", HARMED),
    Case("rate too high", "rate 3", HARMED),
    Case("a rate that no one would give the rows", "rows' rate 10,000", BY_LABELS),
    Case("rate too low", "rate 0.000001", ("not learning yet",)),
    Case("rate too low", "rate 0.00001", ("not learning yet",)),
    Case("rate too low", "photos, rate 0.000001", ("not learning yet", "too early")),
    Case("bug: the encoder climbs", "encoder climbs", HARMED),
    Case("bug: wrong image ids", "wrong image ids", ("not learning yet", *HARMED)),
    Case("bug: all embeddings alike", "constant embedding", ("collapsed",)),
    Case("bug: features of rank 1", "features of rank 1", ("collapsed",)),
    Case("collapsed by weight decay", "weight decay 2", ("collapsed",)),
    Case("memorizing 50 images", "the same views again", ("memorizing",)),
    Case("memorizing 320 images", "the same views again, 320", ("memorizing",)),
    Case("N changed, healthy", "images 125 to 225", GOES_ON),
    Case("N changed, healthy", "images 225 to 125", GOES_ON),
    Case("N changed, healthy", "images 50 to 450", GOES_ON),
]


# --- running ----------------------------------------------------------------------------------------------------------


def put_in(bug: str) -> None:
    """Break the method in this process."""
    import torch

    from millionway import randomness
    from millionway.model import classifier, encoder

    if bug == "climbs":
        step = torch.optim.SGD.__init__
        torch.optim.SGD.__init__ = lambda self, *args, **more: step(self, *args, maximize=True, **more)
    elif bug == "wrong ids":
        forward = classifier.InstanceClassifier.forward
        shift = lambda ids, size: (ids + int(torch.randint(1, size, ()))) % size
        classifier.InstanceClassifier.forward = lambda self, embeddings, ids, *rest: forward(
            self, embeddings, shift(ids, self.num_instances) if embeddings.requires_grad else ids, *rest
        )
    elif bug in ("constant", "rank 1"):
        forward = encoder.Encoder.forward

        def broken(self, images):
            features = forward(self, images)
            if bug == "constant":
                return 1e-3 * features + 1
            return features.mean(dim=1, keepdim=True).expand_as(features) * 1.0

        encoder.Encoder.forward = broken
    elif bug == "same views":
        key_of = randomness.key_of
        randomness.key_of = lambda seed, purpose, *where: (
            key_of(seed, purpose, 0, *where[1:]) if purpose == "view" else key_of(seed, purpose, *where)
        )


def digit_files(folder: Path, num: int) -> None:
    from PIL import Image
    from sklearn.datasets import load_digits

    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for number, pixels in enumerate(load_digits().images[:num]):
        Image.fromarray((pixels * 15.9375).astype("uint8")).save(folder / f"{number:04d}.png")


def interrupt_after(run: Path, epoch: float) -> None:
    """Ctrl-C to this process once the run has come so far."""
    from millionway.reporting.metrics import read_metrics

    for _ in range(36_000):
        time.sleep(0.1)
        if any(line["epoch"] >= epoch for line in read_metrics(run / "metrics.jsonl")):
            os.kill(os.getpid(), signal.SIGINT)
            return


def train(name: str, photos: Path | None, folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run, made in this process."""
    import millionway
    from millionway.reporting.metrics import read_metrics

    this, out = RUNS[name], folder / "run"
    put_in(this.bug)
    settings = DIGITS | {"out": out} | this.settings
    if this.photos:
        settings = this.settings | {"data": str(photos), "out": out, "threads": 1, "labels": "none", "seed": 1}
        settings |= {"row_norm": 1.0, "row_lr": 10.0}
    try:
        if this.images is None:
            millionway.pretrain(**settings)
        else:
            digit_files(folder / "data", this.images[0])
            settings |= {"data": str(folder / "data"), "max_images": None}
            threading.Thread(target=interrupt_after, args=(out, settings["epochs"] / 2), daemon=True).start()
            try:
                millionway.pretrain(**settings)
            except RuntimeError as error:
                print(error)
            digit_files(folder / "data", this.images[1])
            millionway.pretrain(out=out, resume=True, data_changed=True)
    except RuntimeError as error:  # a run that diverges is one of the states
        print(error)
    return [{k: line[k] for k in KEPT if k in line} for line in read_metrics(out / "metrics.jsonl")]


def run_all(photos: Path | None) -> None:
    """Each in a process of its own, because of the bugs."""
    RESULTS.mkdir(exist_ok=True)
    for name, this in RUNS.items():
        if stored(name).exists() or (this.photos and photos is None):
            continue
        print(name, flush=True)
        command = [sys.executable, __file__, "one", "--name", name, *(["--photos", str(photos)] if photos else [])]
        subprocess.run(command, check=True)


def stored(name: str) -> Path:
    return RESULTS / f"{name.replace(' ', '_').replace(',', '')}.jsonl"


# --- judging ----------------------------------------------------------------------------------------------------------


def lines_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stored(name).read_text().splitlines()]


def doubled(name: str) -> tuple[float, float, float]:
    """Fresh views that find their image in the last three evaluations of this run and of the one with twice the epochs,
    and the standard error of the difference."""
    epochs, *rest = name.split(" ")
    shares, variance = [], 0.0
    for each in (name, " ".join([str(2 * int(epochs)), *rest])):
        last = [line for line in lines_of(each) if line["kind"] == "evaluation"][-3:]
        shares.append(sum(line["instance_top1"] for line in last) / len(last))
        variance += shares[-1] * (1 - shares[-1]) / sum(line["num_images"] for line in last)
    return shares[0], shares[1], variance**0.5


def neighbors(name: str) -> tuple[float, float]:
    """k-NN accuracy with labels, before and after training."""
    accuracies = [line["knn_20"] for line in lines_of(name) if line["kind"] == "evaluation"]
    return accuracies[0], accuracies[-1]


def judge(case: Case) -> tuple[str, str, str, bool]:
    """(what is known, the word, all it said, whether that is right)"""
    from millionway.reporting.verdict import verdict

    lines, epochs = lines_of(case.run), RUNS[case.run].settings["epochs"]
    if case.until is not None:
        lines = [line for line in lines if line["epoch"] <= case.until]
    said = verdict(lines, epochs)
    right, known = case.right, case.state
    if not right:
        now, then, error = doubled(case.run)
        known += f"; twice the epochs: {now:.1%} to {then:.1%} ± {error:.1%}"
        helps, helps_not = then - now - error >= HELPS, then - now + error < HELPS
        right = ("still improving",) if helps else ("no longer improving",)
        if not helps and not helps_not:
            right, known = ("still improving", "no longer improving"), f"{known}, undecided"
    elif right == BY_LABELS:
        before, after = neighbors(case.run)
        known += f"; k-NN with labels {before:.0%} to {after:.0%}"
        right = GOES_ON if after > before else HARMED
    if case.until is not None:
        known += f" (epoch {case.until:g} of {epochs})"
    return known, said.word, str(said), said.word in right


def table() -> None:
    from presets import write_between_marks

    rows, num_right = [], 0
    for case in CASES:
        if not stored(case.run).exists():
            continue
        known, _, said, right = judge(case)
        num_right += right
        rows.append(f"| {case.run} | {known} | {said} | {'yes' if right else '**no**'} |")
    lines = ["| run | known state | the verdict | right |", "|---|---|---|---|", *rows]
    lines += ["", f"{num_right} of {len(rows)} are right."]
    write_between_marks(ROOT / "docs" / "experiments.md", "verdicts", "\n".join(lines))
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "one", "table"))
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--name")
    chosen = parser.parse_args()
    if chosen.what == "one":
        with tempfile.TemporaryDirectory() as folder:
            lines = train(chosen.name, chosen.photos, Path(folder))
        stored(chosen.name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    elif chosen.what == "run":
        run_all(chosen.photos)
        table()
    else:
        table()


if __name__ == "__main__":
    main()

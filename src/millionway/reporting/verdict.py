"""Is it learning, and when can it stop? In words, from the numbers of a run; no labels needed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COLLAPSED_RANK = 0.1  # of what the untrained encoder had
COLLAPSED_COSINE = 0.98  # of a view with the nearest row of another image
WORSE_LOSS = 0.02  # of the best one
MEMORIZED = 0.3  # training views find their image more often than fresh ones by this share
FLAT = 0.01  # share by which nothing has improved
FLAT_EVALUATIONS = 3


@dataclass(frozen=True)
class Verdict:
    word: str
    """learning, collapsed, memorizing, learning rate too high, no longer improving, too early"""
    reasons: str
    """the numbers that led to it"""

    def __str__(self) -> str:
        return f"{self.word} ({self.reasons})"


def verdict(lines: Sequence[dict[str, Any]]) -> Verdict:
    """From the lines of metrics.jsonl. The first that fits, the gravest first."""
    steps = [line for line in lines if line["kind"] == "step"]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    if len(evaluations) < 2 or len(steps) < 2:
        return Verdict("too early", f"{len(evaluations)} evaluations, {len(steps)} logged steps")
    return (
        _rate_too_high(steps)
        or _collapsed(evaluations)
        or _memorizing(steps, evaluations)
        or _flat(steps, evaluations)
        or _learning(steps, evaluations)
    )


def _smooth(steps: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Means over tenths of the run, so that a single batch decides nothing."""
    return _means([line[name] for line in steps], 10)


def _rate_too_high(steps: Sequence[dict[str, Any]]) -> Verdict | None:
    losses = _smooth(steps, "loss")
    if not all(map(math.isfinite, losses)):
        return Verdict("learning rate too high", "the loss is not finite")
    best = min(losses)
    settled = steps[-1]["epoch"] >= 2  # right after the prior the loss may rise for a while
    if settled and losses[-1] > best + WORSE_LOSS * abs(best) and losses[-1] >= losses[0]:
        return Verdict(
            "learning rate too high", f"loss {losses[0]:.3f} at first, {best:.3f} at best, now {losses[-1]:.3f}"
        )
    return None


def _collapsed(evaluations: Sequence[dict[str, Any]]) -> Verdict | None:
    first, last = evaluations[0]["effective_rank"], evaluations[-1]["effective_rank"]
    if last < max(2.0, COLLAPSED_RANK * first):
        return Verdict("collapsed", f"effective rank {last:.1f}, before training {first:.1f}")
    nearest = evaluations[-1]["hardest_negative_cosine"]
    if nearest > COLLAPSED_COSINE and evaluations[-1]["instance_top1"] < 0.5:
        return Verdict("collapsed", f"rows of other images are as near as cosine {nearest:.3f}")
    return None


def _memorizing(steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> Verdict | None:
    """Views of the batch are found, fresh views of the same images less and less."""
    training = _smooth(steps, "batch_top1")[-1]
    fresh = [line["instance_top1"] for line in evaluations]
    if training - fresh[-1] > MEMORIZED and fresh[-1] < max(fresh):
        reasons = f"training views find their image in {training:.0%}, "
        return Verdict("memorizing", reasons + f"fresh ones in {fresh[-1]:.0%}, after {max(fresh):.0%}")
    return None


def _flat(steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> Verdict | None:
    if len(evaluations) <= FLAT_EVALUATIONS:
        return None
    before, recent = evaluations[:-FLAT_EVALUATIONS], evaluations[-FLAT_EVALUATIONS:]
    found = [max(line["instance_top1"] for line in part) for part in (before, recent)]
    margins = [max(line["positive_cosine"] - line["hardest_negative_cosine"] for line in p) for p in (before, recent)]
    epoch = recent[0]["epoch"]
    losses = [[line["loss"] for line in steps if (line["epoch"] > epoch) is late] for late in (False, True)]
    if not losses[0] or not losses[1]:
        return None
    old_loss, new_loss = (min(_means(each, 3)) for each in losses)
    still = (
        found[1] > found[0] * (1 + FLAT) + 1e-3
        or margins[1] > margins[0] + FLAT
        or new_loss < old_loss - FLAT * abs(old_loss)
    )
    if still:
        return None
    reasons = f"in {FLAT_EVALUATIONS} evaluations fresh views that find their image went from {found[0]:.1%} to "
    reasons += f"{found[1]:.1%}, the loss from {old_loss:.3f} to {new_loss:.3f}"
    return Verdict("no longer improving: you can stop", reasons)


def _means(values: Sequence[float], num_parts: int) -> list[float]:
    """Of equal parts; what is left over is one more."""
    size = max(1, len(values) // num_parts)
    return [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]


def _learning(steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> Verdict:
    losses = _smooth(steps, "loss")
    found = [line["instance_top1"] for line in evaluations]
    reasons = f"loss {losses[0]:.3f} to {losses[-1]:.3f}, "
    return Verdict("learning", reasons + f"fresh views that find their image {found[0]:.1%} to {found[-1]:.1%}")

"""Is it learning, and when can it stop? In words, from the numbers of a run; no labels needed.

Losses are taken relative to ln N, what guessing costs, so that they can be compared when images came or went. A
difference counts when it is beyond the noise of what is compared. docs/experiments.md says how often it was right.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COLLAPSED_RANK = 0.1  # of what the untrained encoder had
COLLAPSED_COSINE = 0.98  # of a view with the nearest row of another image
MEMORIZED = 0.3  # training views find their image more often than fresh ones by this share
NOISE = 3.0  # standard errors
LOSS_GAIN = 0.15  # nats: less than this is no news, however sure
FOUND_GAIN = 0.02  # share of fresh views that find their image, likewise
SOME_NOISE = 1.5  # standard errors, where two numbers are asked and either may answer
DOUBLINGS = (0.25, 0.5, 1.0)  # of the epochs so far, or of those since views are large
FRESH_VIEWS = 1024  # at most so many are looked up at an evaluation
EARLY_EPOCHS = 3
STEP = {"epoch", "loss", "batch_top1", "lr"}  # what a line must have to be considered
EVALUATION = {"epoch", "instance_top1", "effective_rank", "hardest_negative_cosine"}
SMALL_VIEWS = "small_views"
"""in an evaluation while views are smaller than they will be: nobody knows yet what the larger ones bring"""
OF_FULL_VIEWS = "full_"
"""begins the names of what the first evaluation says of those larger views"""
FLAT = "no longer improving"
TRY_LOWER = "start again with a lower --lr"


@dataclass(frozen=True)
class Verdict:
    word: str
    """learning, still improving, no longer improving, too early, not learning yet, memorizing, collapsed, learning rate
    too high"""
    reasons: str
    """the numbers that led to it"""
    advice: str = ""
    """what to do"""

    def __str__(self) -> str:
        advice = f": {self.advice}" if self.advice else ""
        return f"{self.word}{advice} ({self.reasons})"


@dataclass(frozen=True)
class Mean:
    value: float
    error: float
    """its standard error"""

    def beats(self, other: "Mean", at_least: float, noise: float = NOISE) -> bool:
        """Whether it is higher by more than so many standard errors, and by `at_least`."""
        return self.value - other.value > max(at_least, noise * math.hypot(self.error, other.error))


def verdict(lines: Sequence[dict[str, Any]], epochs: int | None = None) -> Verdict:
    """From the lines of metrics.jsonl. epochs: how many the run is to have. The first that fits, the gravest first."""
    steps = [line for line in lines if line["kind"] == "step" and line.keys() >= STEP]
    evaluations = [line for line in lines if line["kind"] == "evaluation" and line.keys() >= EVALUATION]
    if any(not math.isfinite(line["loss"]) for line in steps):
        return Verdict("learning rate too high", "the loss is not finite", TRY_LOWER)
    if len(evaluations) < 2 or len(steps) < 2:
        return Verdict("too early", f"{len(evaluations)} evaluations, {len(steps)} logged steps")
    evaluations[0] = first_like_last(evaluations)
    return (
        _collapsed(evaluations)
        or _memorizing(steps, evaluations)
        or _rate_too_high(steps, evaluations)
        or _not_yet(steps, evaluations)
        or _no_longer(steps, evaluations, epochs)
        or _improving(steps, evaluations, epochs)
    )


# --- what is compared -------------------------------------------------------------------------------------------------


def first_like_last(evaluations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first evaluation, with the numbers of views of the side that the last one has."""
    first, last = evaluations[0], evaluations[-1]
    if SMALL_VIEWS in last:
        return first
    names = [name for name in first if name.startswith(OF_FULL_VIEWS)]
    return first | {name.removeprefix(OF_FULL_VIEWS): first[name] for name in names}


def _excess(line: dict[str, Any]) -> float:
    """The loss beyond that of guessing."""
    return line["loss"] - math.log(line.get("num_images", 1))


def _noise(steps: Sequence[dict[str, Any]]) -> float:
    """Standard deviation of a step's loss around its trend, from how far each is off the line between its neighbors."""
    losses = [_excess(line) for line in steps]
    off = sorted(abs(a - 2 * b + c) / math.sqrt(6) for a, b, c in zip(losses, losses[1:], losses[2:]))
    return (
        off[(len(off) - 1) // 2] / 0.6745 if off else abs(losses[-1] - losses[0])
    )  # by the median: a jump is not noise


def _loss(steps: Sequence[dict[str, Any]], noise: float) -> Mean:
    """Negative, so that higher is better as for shares."""
    return Mean(-sum(map(_excess, steps)) / len(steps), noise / math.sqrt(len(steps)))


def _found(evaluations: Sequence[dict[str, Any]]) -> Mean:
    """How many fresh views find their own image, over these evaluations."""
    share = sum(line["instance_top1"] for line in evaluations) / len(evaluations)
    num_views = sum(min(FRESH_VIEWS, line.get("num_images", FRESH_VIEWS)) for line in evaluations)
    return Mean(share, math.sqrt(max(share * (1 - share), 1 / num_views) / num_views))


def _tenth(lines: Sequence[dict[str, Any]]) -> int:
    return max(1, len(lines) // 10)


def _start_and_now(steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> tuple[Mean, ...]:
    """(loss at first, now, fresh views found at first, now)"""
    noise, num = _noise(steps), _tenth(steps)
    return (
        _loss(steps[:num], noise),
        _loss(steps[-num:], noise),
        _found(evaluations[:1]),
        _found(evaluations[-1:]),
    )


def _in_words(steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> str:
    """Losses as they are logged; relative to ln N where that has changed."""
    num = _tenth(steps)
    counts = [line.get("num_images", 0) for line in steps]
    of, name = (_excess, "loss beyond ln N") if len(set(counts)) > 1 else (lambda line: line["loss"], "loss")
    first, last = (sum(map(of, part)) / len(part) for part in (steps[:num], steps[-num:]))
    found = f"{evaluations[0]['instance_top1']:.1%} to {evaluations[-1]['instance_top1']:.1%}"
    return f"{name} {first:.2f} to {last:.2f}, fresh views that find their image {found}"


# --- the words --------------------------------------------------------------------------------------------------------


def _collapsed(evaluations: Sequence[dict[str, Any]]) -> Verdict | None:
    first, last = evaluations[0]["effective_rank"], evaluations[-1]["effective_rank"]
    advice = "features of different images are all alike; start again with a lower --lr or --weight-decay"
    if last < max(2.0, COLLAPSED_RANK * first):
        return Verdict("collapsed", f"effective rank {last:.1f}, before training {first:.1f}", advice)
    nearest = evaluations[-1]["hardest_negative_cosine"]
    if nearest > COLLAPSED_COSINE and evaluations[-1]["instance_top1"] < 0.5:
        return Verdict("collapsed", f"rows of other images are as near as cosine {nearest:.3f}", advice)
    return None


def _memorizing(steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> Verdict | None:
    """Views of the batch are found, fresh views of the same images are not, and that gets no better."""
    num = _tenth(steps)
    training = sum(line["batch_top1"] for line in steps[-num:]) / num
    fresh = [line["instance_top1"] for line in evaluations]
    recent = evaluations[-1 - len(evaluations) // 3 :]
    grows = _found(recent[-1:]).beats(_found(recent[:1]), FOUND_GAIN)
    if training - fresh[-1] <= MEMORIZED or grows:
        return None
    reasons = (
        f"training views find their image in {training:.0%}, fresh ones in {fresh[-1]:.0%}, at best {max(fresh):.0%}"
    )
    return Verdict("memorizing", reasons, "stronger views help (--crop-min, --jitter, --blur), or more images")


def _rate_too_high(steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> Verdict | None:
    """The loss is above what it was at first, and fresh views are not found more often; surely, or both are worse."""
    if steps[-1]["epoch"] < EARLY_EPOCHS:  # right after the prior the loss may rise for a while
        return None
    first_loss, loss, first_found, found = _start_and_now(steps, evaluations)
    surely = first_loss.beats(loss, LOSS_GAIN) and not found.beats(first_found, FOUND_GAIN)
    both = first_loss.beats(loss, LOSS_GAIN, SOME_NOISE) and first_found.beats(found, FOUND_GAIN)
    if surely or both:
        return Verdict("learning rate too high", _in_words(steps, evaluations), TRY_LOWER)
    return None


def _not_yet(steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> Verdict | None:
    """Neither number beats its start beyond noise."""
    first_loss, loss, first_found, found = _start_and_now(steps, evaluations)
    if loss.beats(first_loss, LOSS_GAIN) or found.beats(first_found, FOUND_GAIN):
        return None
    reasons, epoch = _in_words(steps, evaluations), steps[-1]["epoch"]
    rising = steps[-1]["lr"] > steps[max(0, len(steps) - 1 - _tenth(steps))]["lr"]
    if epoch < EARLY_EPOCHS or (rising and steps[-1]["lr"] >= max(line["lr"] for line in steps)):
        return Verdict("too early", reasons, "the learning rate still rises" if rising else "")
    return Verdict("not learning yet", reasons, "try a higher --lr or weaker views (--crop-min 0.3)")


def _no_longer(
    steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]], epochs: int | None
) -> Verdict | None:
    """Twice the epochs would bring nothing worth the time, by what the last two doublings brought."""
    small = [line["epoch"] for line in evaluations if SMALL_VIEWS in line]
    since = small[-1] if small else -1.0  # views of other sizes are found more or less often
    steps = [line for line in steps if line["epoch"] > since]
    evaluations = [line for line in evaluations if line["epoch"] > since]
    if len(evaluations) < (3 if small else 5) or len(steps) < 8:
        return None
    epoch, first, noise = steps[-1]["epoch"], max(0.0, since), _noise(steps)
    length = epoch - first
    looked_at = [_near(evaluations, first + share * length, length) for share in DOUBLINGS]
    found = [_found(each) for each in looked_at]
    losses = [_loss(_near(steps, first + share * length, length), noise) for share in DOUBLINGS]
    if _next_gain(*found) > FOUND_GAIN or _next_gain(*losses) > LOSS_GAIN:
        return None
    half = sum(line["epoch"] for line in looked_at[1]) / len(looked_at[1])
    reasons = f"from epoch {half:.0f} to {epoch:.0f} fresh views that find their image went from "
    reasons += f"{found[1].value:.1%} to {found[2].value:.1%}"
    is_over = epochs is not None and epoch >= epochs
    return Verdict(FLAT, reasons, "more epochs would bring little" if is_over else "you can stop")


def _near(lines: Sequence[dict[str, Any]], epoch: float, length: float) -> list[dict[str, Any]]:
    """Those within a tenth of the run around an epoch, or the nearest one. length: of the run, in epochs."""
    nearest = min(lines, key=lambda line: abs(line["epoch"] - epoch))
    return [line for line in lines if abs(line["epoch"] - epoch) <= 0.1 * length] or [nearest]


def _next_gain(quarter: Mean, half: Mean, now: Mean) -> float:
    """What twice the epochs would bring, if gains go on shrinking as they did; nothing where there is only noise."""
    before, gain = half.value - quarter.value, now.value - half.value
    if not now.beats(half, 0.0, SOME_NOISE):
        return 0.0
    return gain * min(1.0, gain / before) if before > 0 else gain


def _improving(steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]], epochs: int | None) -> Verdict:
    reasons = _in_words(steps, evaluations)
    if epochs is None or steps[-1]["epoch"] < epochs:
        return Verdict("learning", reasons)
    return Verdict("still improving", reasons, f"go on with --resume --epochs {2 * epochs}")

"""With --init-from: is the encoder still as good as the one it began as? By a number that needs no labels.

That number is how many views of an image find the other view of it among those of other images, by the encoder's
features alone: neither head nor rows have a say, so the given weights can be asked too, before anything was learned.
The views are the same at each evaluation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NUMBER = "views_found"
FIRST_NUMBER = f"start_{NUMBER}"  # before the prior, which may move the statistics of BN
NOISE = 2.0  # standard errors


@dataclass(frozen=True)
class Judgment:
    is_kept: bool
    """whether the newest encoder takes the place of the one before"""
    is_worse: bool
    """whether it is worse than the start, so that the run ends"""
    start: float = math.nan
    now: float = math.nan

    def __str__(self) -> str:
        return (
            f"views that find the other view of their image: {self.start:.1%} with the weights it began with, "
            f"{self.now:.1%} now"
        )


def judge(lines: Sequence[dict[str, Any]], num_views: int) -> Judgment:
    """From the lines of metrics.jsonl, the newest evaluation last. num_views: how many were looked up at each.

    Less than the best by more than noise is not kept; less than the start by more than noise ends the run.
    """
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    if not evaluations or FIRST_NUMBER not in evaluations[0] or NUMBER not in evaluations[-1]:
        return Judgment(is_kept=True, is_worse=False)
    found = [evaluations[0][FIRST_NUMBER], *(line[NUMBER] for line in evaluations if NUMBER in line)]
    start, best, now = found[0], max(found), found[-1]
    noise = NOISE * math.sqrt(max(best * (1 - best), 1 / num_views) / num_views)
    return Judgment(now >= best - noise, now < start - noise, start, now)

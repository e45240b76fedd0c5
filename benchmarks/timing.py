"""Sides of a comparison, measured in turns, so that a noisy machine disturbs all of them alike."""

import time
from collections.abc import Callable


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def alternate(sides: dict[str, Callable[[], object]], turns: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds of each side, in turns, after turns that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns + warm_up):
        for name, work in sides.items():
            value = timed(work)
            if turn >= warm_up:
                seconds[name].append(value)
    return seconds

"""Sides of views: smaller ones first. What is learned early needs no fine details, and such steps take less time."""

from collections.abc import Iterator
from dataclasses import dataclass

from millionway.settings.pretrain import Pretrain
from millionway.train.extend import stretches

FIRST_SHARE = 0.7
"""of the steps, but for those that a finished run is extended by"""


@dataclass(frozen=True)
class Sizes:
    """Which side views have at which step: a function of the step alone."""

    full: int
    first: int
    num_first: int
    """steps with views of the first side"""

    @staticmethod
    def of(config: Pretrain, steps_per_epoch: int) -> "Sizes":
        full, first = config.images.image_size, config.images.first_size
        assert full is not None
        num_steps = stretches(config)[0].last * steps_per_epoch
        num_first = min(round(FIRST_SHARE * num_steps), num_steps - 1)  # a run ends with the full side
        return Sizes(full, first if isinstance(first, int) else full, num_first)

    def before(self, num_steps: int) -> int:
        """The side of the last of so many steps, or of the first one."""
        return self.first if max(1, num_steps) <= self.num_first else self.full

    def parts(self, steps: range) -> Iterator[tuple[int, range]]:
        """Steps in a row that share a side: (side, steps)."""
        for size, part in (
            (self.first, range(steps.start, min(steps.stop, self.num_first))),
            (self.full, range(max(steps.start, self.num_first), steps.stop)),
        ):
            if part:
                yield size, part

    def shares(self) -> dict[int, float]:
        """{side: how many of a run's steps have it}"""
        return {self.full: 1.0} if self.first == self.full else {self.first: FIRST_SHARE, self.full: 1 - FIRST_SHARE}

    def work(self, num_steps: int) -> float:
        """What the first so many steps take, one of the full side being 1: about as much as they have pixels."""
        return num_steps - min(num_steps, self.num_first) * (1 - (self.first / self.full) ** 2)

"""Which instances at which step: a pure function of (seed, epoch, step), so a run resumes anywhere."""

from functools import lru_cache

import torch
from torch import Tensor

from millionway import randomness


class Sampler:
    """Every instance once per epoch, in an order of its own for each epoch.

    The last incomplete batch of an epoch is dropped; as the order changes, no instance is left out for long.
    """

    def __init__(self, instance_ids: Tensor, batch_size: int, seed: int) -> None:
        assert len(instance_ids) >= batch_size
        self.instance_ids = instance_ids  # [visited instances] int64, ascending
        self.batch_size = batch_size
        self.seed = seed
        self.steps_per_epoch = len(instance_ids) // batch_size
        self.order = lru_cache(maxsize=2)(self._order)

    def _order(self, epoch: int) -> Tensor:
        """All instance ids in the order of this epoch."""
        generator = randomness.generator(self.seed, "order", epoch)
        return self.instance_ids[torch.randperm(len(self.instance_ids), generator=generator)]

    def batch(self, step: int) -> Tensor:
        """The instance ids of a step, counted from the start of the run: [batch_size] int64."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        start = step_in_epoch * self.batch_size
        return self.order(epoch)[start : start + self.batch_size]

    def pass_over_all(self) -> list[Tensor]:
        """Every instance in the order of epoch 0, in full batches: the last is filled up from the one before."""
        order, size = self.order(0), self.batch_size
        starts = [min(start, len(order) - size) for start in range(0, len(order), size)]
        return [order[start : start + size] for start in starts]

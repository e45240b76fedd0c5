"""Who is still there? Every rank sends a heartbeat; one that waits in vain looks whose last one is old."""

import threading
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from millionway.parallel.group import Group


class Heartbeat:
    """A thread that writes (step, time) into the store of all ranks, a few times per timeout."""

    def __init__(self, group: Group, timeout: float) -> None:
        self.group, self.interval = group, min(10.0, timeout / 5)
        self.step = 0
        self.ended = threading.Event()
        if group.size > 1:
            threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def _beat(self) -> None:
        with suppress(Exception):  # the machine with the store is gone; the training will notice
            while not self.ended.is_set():
                _store().set(f"heartbeat/{self.group.rank}", f"{self.step} {time.time()}")
                self.ended.wait(self.interval)

    def _read(self, last: dict[int, tuple[int, float]]) -> None:
        """Put the (step, seconds ago) of every rank's last heartbeat into `last`."""
        with suppress(Exception):
            for rank in range(self.group.size):
                if _store().check([f"heartbeat/{rank}"]):
                    step, at = _store().get(f"heartbeat/{rank}").decode().split()
                    last[rank] = int(step), time.time() - float(at)

    def close(self) -> None:
        self.ended.set()

    def silent_ranks(self) -> str:
        """The ranks without a recent heartbeat, or else those behind; '' if there are none, or nothing is known."""
        last: dict[int, tuple[int, float]] = {}
        # In a thread, because a store behind a cut cable never answers.
        reader = threading.Thread(target=self._read, args=(last,), daemon=True)
        reader.start()
        reader.join(self.interval)
        if reader.is_alive():
            return "the machine of rank 0 does not answer"
        silent = [rank for rank in last if last[rank][1] > 2.5 * self.interval]
        if not silent and last:
            foremost = max(step for step, _ in last.values())
            silent = [rank for rank in last if last[rank][0] < foremost]
        return ", ".join(
            f"rank {rank} was last heard of at step {last[rank][0]}, {last[rank][1]:.0f} s ago" for rank in silent
        )


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()

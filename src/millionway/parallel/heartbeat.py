"""Who is still there? Each rank leaves word of itself; when one waits in vain, it reads whose words are old."""

import threading
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from millionway.parallel.group import Group


class Heartbeat:
    """A thread that leaves (step, time) in the store that all ranks share, a few times per timeout."""

    def __init__(self, group: Group, timeout: float) -> None:
        self.group, self.interval = group, min(10.0, timeout / 5)
        self.step = 0
        self.ended = threading.Event()
        if group.size > 1:
            threading.Thread(target=self._leave_words, daemon=True, name="heartbeat").start()

    def _leave_words(self) -> None:
        with suppress(Exception):  # the machine that keeps the words is gone; the training will notice
            while not self.ended.is_set():
                _store().set(f"alive/{self.group.rank}", f"{self.step} {time.time()}")
                self.ended.wait(self.interval)

    def _read_words(self, seen: dict[int, tuple[int, float]]) -> None:
        with suppress(Exception):
            for rank in range(self.group.size):
                if _store().check([f"alive/{rank}"]):
                    step, at = _store().get(f"alive/{rank}").decode().split()
                    seen[rank] = int(step), time.time() - float(at)

    def close(self) -> None:
        self.ended.set()

    def silent_ranks(self) -> str:
        """Whose words are old, or else who is behind, in words; empty if nobody is, or nothing is known."""
        seen: dict[int, tuple[int, float]] = {}
        # In a thread, because words kept behind a cut cable never come.
        reader = threading.Thread(target=self._read_words, args=(seen,), daemon=True)
        reader.start()
        reader.join(self.interval)
        if reader.is_alive():
            return "the machine of rank 0 does not answer"
        silent = [rank for rank in seen if seen[rank][1] > 2.5 * self.interval]
        if not silent and seen:
            first = max(step for step, _ in seen.values())
            silent = [rank for rank in seen if seen[rank][0] < first]
        return ", ".join(
            f"rank {rank} was last heard of at step {seen[rank][0]}, {seen[rank][1]:.0f} s ago" for rank in silent
        )


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()

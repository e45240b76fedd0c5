"""Who is still there? Every rank sends a heartbeat; one that waits in vain looks whose last one is old."""

import threading
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from millionway.console import first_line
from millionway.parallel.group import Group

LISTEN_SECONDS = 0.5
GOODBYE_SECONDS = 5.0  # that a rank which fails waits until the others have heard why


class Heartbeat:
    """A thread that writes (step, time) into the store of all ranks, a few times per timeout, and listens there."""

    def __init__(self, group: Group, timeout: float) -> None:
        self.group, self.interval = group, min(10.0, timeout / 5)
        self.step = 0
        self.ended = threading.Event()
        self.heard = ""
        """why another rank has failed"""
        if group.size > 1:
            threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def _beat(self) -> None:
        last = -self.interval
        with suppress(Exception):  # the machine with the store is gone; the training will notice
            while not self.ended.is_set():
                if time.monotonic() - last >= self.interval:
                    _store().set(f"heartbeat/{self.group.rank}", f"{self.step} {time.time()}")
                    last = time.monotonic()
                self._listen()
                self.ended.wait(min(LISTEN_SECONDS, self.interval))

    def _listen(self) -> None:
        if not self.heard and _store().check(["failed"]):
            self.heard = _store().get("failed").decode()
            _store().set(f"heard/{self.group.rank}", "")

    def tell_why(self, error: BaseException) -> None:
        """Tell the others, who will find the connection closed. The first word stands.

        The store may be in this process, so it waits until they have heard.
        """
        if self.group.size > 1:
            with suppress(Exception):
                words = f"rank {self.group.rank} failed with {type(error).__name__}: {first_line(error)}"
                is_first = _store().compare_set("failed", "", words).decode() == words
                self._listen()
                everybody = [f"heard/{rank}" for rank in range(self.group.size)]
                deadline = time.monotonic() + GOODBYE_SECONDS
                while is_first and not _store().check(everybody) and time.monotonic() < deadline:
                    time.sleep(0.05)

    def _read(self, last: dict[int, tuple[int, float]]) -> None:
        """Put the (step, seconds ago) of every rank's last heartbeat into `last`."""
        with suppress(Exception):
            self._listen()
            for rank in range(self.group.size):
                if _store().check([f"heartbeat/{rank}"]):
                    step, at = _store().get(f"heartbeat/{rank}").decode().split()
                    last[rank] = int(step), time.time() - float(at)

    def close(self) -> None:
        self.ended.set()

    def trouble_elsewhere(self) -> str:
        """Why a rank has failed; or the ranks without a recent heartbeat, or else those behind; '' if none is known."""
        last: dict[int, tuple[int, float]] = {}
        # In a thread, because a store behind a cut cable never answers.
        reader = threading.Thread(target=self._read, args=(last,), daemon=True)
        if not self.heard:
            reader.start()
            reader.join(self.interval)
        if self.heard:
            return self.heard
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

"""Work by threads or processes, results in order."""

import inspect
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

import numpy as np
import torch

In = TypeVar("In")
Out = TypeVar("Out")

Progress = Callable[[Iterable, int, str], Iterable]
"""(items, how many, what is done) -> the items, with a bar"""

MANY = 128  # fewer images are read by threads: processes would take longer to begin
IMAGES_PER_CALL = 64


def in_order(
    work: Callable[[In], Out], items: Iterable[In], num_workers: int, num_ahead: int, processes: bool = False
) -> Iterator[Out]:
    """work(item) for each item; at most `num_ahead` items are begun before their turn, so memory stays bounded.

    Whoever stops early (Ctrl-C, an error) does not wait for what was not begun. Without workers, each in its turn.
    """
    if num_workers == 0:
        yield from map(work, items)
        return
    workers = Workers(work, num_workers, processes)
    waiting: deque[Future[Out]] = deque()
    try:
        for item in items:
            waiting.append(workers.begin(item))
            if len(waiting) > num_ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ReaderKilled from None
    finally:
        workers.close()


def in_calls(
    work: Callable[[np.ndarray], Out], ids: np.ndarray, num_workers: int, shareable: bool
) -> tuple[Iterator[Out], list[np.ndarray]]:
    """(work(some ids) in order, those ids): a call for a few images at a time, by processes if that pays."""
    calls = [ids[start : start + IMAGES_PER_CALL] for start in range(0, len(ids), IMAGES_PER_CALL)]
    return in_order(work, calls, num_workers, 4 * num_workers, by_processes(shareable, num_workers, len(ids))), calls


def by_processes(shareable: bool, num_workers: int, num_images: int) -> bool:
    return shareable and num_workers > 1 and num_images > MANY


class ReaderKilled(RuntimeError):
    def __init__(self) -> None:
        super().__init__("a process that reads images was killed; is there enough memory?")


class Workers(Generic[In, Out]):
    """Threads, or forked processes, which know all that the parent knew when the first item was begun.

    Where processes are not forked safely, threads do their work.
    """

    def __init__(self, work: Callable[[In], Out], num: int, processes: bool) -> None:
        self.pool: Executor
        self.call: Callable[[In], Out]
        if processes and sys.platform == "linux":
            context = multiprocessing.get_context("fork")
            # Whose method it is must be able to go away, and its processes with it.
            weak = weakref.WeakMethod(work) if inspect.ismethod(work) else lambda: work
            self.pool = ProcessPoolExecutor(num, context, _begin, (weak, os.getpid()))
            self.call = _call
        else:
            self.pool, self.call = ThreadPoolExecutor(num), work

    def begin(self, item: In) -> Future[Out]:
        return self.pool.submit(self.call, item)

    def all(self, items: Iterable[In]) -> list[Out]:
        """The results of all items, in order."""
        try:
            return [future.result() for future in [self.begin(item) for item in items]]
        except BrokenProcessPool:
            raise ReaderKilled from None

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


_work: Callable[[Any], Any] | None = None


def _begin(work: Callable[[], Callable | None], parent: int) -> None:
    global _work  # noqa: PLW0603: what this process is for
    _work = work()
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not through the parent's progress bar
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # its threads did not come along
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: int) -> None:
    """Whoever kills the parent leaves nobody behind."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _call(item: Any) -> Any:
    assert _work is not None
    return _work(item)

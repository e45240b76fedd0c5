"""One thread per core, each with whole blocks of its own.

A small operation that is split over all cores waits at its end for the slowest of them. Blocks are independent, so on a
CPU each worker takes some and works through them alone. On other devices, and with one core, everything stays in the
calling thread.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_WORKERS = 8  # more would wait for each other's Python; further cores are divided among these


def num_workers(device: torch.device) -> int:
    """How many blocks are worked on at a time."""
    return min(torch.get_num_threads(), MAX_WORKERS) if device.type == "cpu" else 1


def on_each(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    device: torch.device,
    done: Callable[[], object] = lambda: None,
) -> list[Result]:
    """The results in the order of the items. When it returns or raises, no worker is still at it.

    done: called by the calling thread after each item.
    """
    num_threads = torch.get_num_threads()
    if device.type != "cpu" or num_threads == 1:
        return [(function(item), done())[0] for item in items]
    futures: list[Future[Result]] = []
    try:
        futures = [_pool(num_threads, os.getpid()).submit(_without_grad, function, item) for item in items]
        for future in as_completed(futures):
            future.result()
            done()
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
    return [future.result() for future in futures]


def _without_grad(function: Callable[[Item], Result], item: Item) -> Result:
    with torch.no_grad():  # grad mode belongs to the thread
        return function(item)


@functools.lru_cache(maxsize=1)
def _pool(num_threads: int, process: int) -> ThreadPoolExecutor:
    """`process`: threads do not survive a fork, so a child needs its own."""
    size = min(num_threads, MAX_WORKERS)
    together = threading.Barrier(size + 1)

    def start() -> None:
        torch.get_num_threads()  # a thread takes over the common number at its first use, so that comes first
        torch.set_num_threads(num_threads // size)
        together.wait()

    pool = ThreadPoolExecutor(size, thread_name_prefix="millionway", initializer=start)
    for _ in range(size):
        pool.submit(int)  # starts one more thread, as none is free before all are there
    together.wait()
    torch.set_num_threads(num_threads)  # what threads to come take over
    return pool

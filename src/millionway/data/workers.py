"""Work by threads or processes, results in order."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


def in_order(
    work: Callable[[In], Out], items: Iterable[In], num_workers: int, num_ahead: int, processes: bool = False
) -> Iterator[Out]:
    """work(item) for each item; at most `num_ahead` items are begun before their turn, so memory stays bounded.

    Whoever stops early (Ctrl-C, an error) does not wait for what was not begun. Without workers, each in its turn.
    """
    if num_workers == 0:
        yield from map(work, items)
        return
    pool: Executor = _processes(work, num_workers) if processes else ThreadPoolExecutor(num_workers)
    call: Callable[[In], Out] = _call if processes else work
    waiting: deque[Future[Out]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(call, item))
            if len(waiting) > num_ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise RuntimeError("a process that reads images was killed; is there enough memory?") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _processes(work: Callable, num: int) -> ProcessPoolExecutor:
    """Forked where that is usual, so that they know the images already; else they are told once."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    return ProcessPoolExecutor(num, context, _begin, (work, os.getpid()))


_work: Callable[[Any], Any] | None = None


def _begin(work: Callable, parent: int) -> None:
    global _work  # noqa: PLW0603: what this process is for
    _work = work
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

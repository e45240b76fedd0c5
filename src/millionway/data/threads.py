"""Work by threads, results in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


def in_order(work: Callable[[In], Out], items: Iterable[In], num_threads: int, num_ahead: int) -> Iterator[Out]:
    """work(item) for each item; at most `num_ahead` items are begun before their turn, so memory stays bounded.

    Whoever stops early (Ctrl-C, an error) does not wait for what was not begun.
    """
    pool = ThreadPoolExecutor(num_threads)
    waiting: deque[Future[Out]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > num_ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)

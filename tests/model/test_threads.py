import threading
import time

import pytest
import torch

from millionway.model import threads

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2, 3])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_results_come_in_order_and_from_several_threads(num_threads: int) -> None:
    def where(item: int) -> tuple[int, str, int, bool]:
        time.sleep(0.01 * (item % 3))
        return item, threading.current_thread().name, torch.get_num_threads(), torch.is_grad_enabled()

    with torch.no_grad():
        results = threads.on_each(where, range(12), CPU)
    assert [result[0] for result in results] == list(range(12))
    assert len({result[1] for result in results}) == num_threads
    assert all(result[2] == 1 and not result[3] for result in results)
    assert torch.get_num_threads() == num_threads  # as before, here and in threads to come
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert seen == [num_threads]


def test_after_an_error_no_worker_is_still_at_it(num_threads: int) -> None:
    running, begun = set(), []

    def fail_at_two(item: int) -> None:
        begun.append(item)
        running.add(item)
        time.sleep(0.02)
        running.remove(item)
        if item == 2:
            raise MemoryError("full")

    with pytest.raises(MemoryError, match="full"):
        threads.on_each(fail_at_two, range(100), CPU)
    assert not running and len(begun) < 20

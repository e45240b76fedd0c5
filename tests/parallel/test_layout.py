import resource
import signal
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millionway.parallel.group import Group
from millionway.parallel.layout import local_range
from millionway.parallel.row_shards import load_shards, save_shards
from millionway.train.checkpoint import is_full_disk


@given(num=st.integers(0, 50), size=st.integers(1, 9))
def test_ranges_are_those_of_torch_chunk(num: int, size: int) -> None:
    chunks = [len(chunk) for chunk in torch.arange(num).chunk(size)] if num else []
    ranges = [local_range(num, rank, size) for rank in range(size)]
    assert [stop - start for start, stop in ranges if stop > start] == [length for length in chunks if length]
    assert ranges[0][0] == 0 and ranges[-1][1] == num
    assert all(a[1] == b[0] for a, b in pairwise(ranges))


def test_a_write_that_fails_says_why(tmp_path) -> None:
    """A limit on the size of files stands for a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            save_shards({"rows": torch.zeros(1 << 20)}, tmp_path / "classifier", Group(), 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert is_full_disk(caught.value)


def test_shards_come_back(tmp_path) -> None:
    saved = {"rows": torch.randn(7, 3), "hardest": torch.randint(7, (7, 2), dtype=torch.int32)}
    save_shards(saved, tmp_path / "classifier", Group(), 7)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    load_shards(loaded, tmp_path / "classifier", Group(), 7)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)

"""What is written is what safetensors reads, whatever shape, layout and dtype it has."""

import json
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from millionway.tensor_file import BYTES_AT_ONCE, DTYPES, write_tensors

SHAPES = st.lists(st.integers(0, 5), max_size=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tensors") / "some.safetensors"


@given(st.dictionaries(st.text(min_size=1), st.tuples(SHAPES, st.sampled_from(list(DTYPES.values()))), max_size=6))
def test_the_library_reads_them_and_none_is_out_of_line(path: Path, kinds: dict) -> None:
    kinds.pop("__metadata__", None)
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (shape, dtype) in kinds.items()}
    write_tensors(path, tensors, {"a": 'b "c"'})
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert torch.equal(read[name], tensor)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"a": 'b "c"'}
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    starts = {name: 8 + length + header[name]["data_offsets"][0] for name in tensors}
    assert all(start % tensors[name].itemsize == 0 for name, start in starts.items())


def test_long_and_scattered_ones_come_in_parts(path: Path) -> None:
    tensors = {
        "long": torch.arange(BYTES_AT_ONCE + 3, dtype=torch.int32),
        "turned": torch.arange(3_000_000, dtype=torch.float64).view(3, -1).T,
        "picture": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
        "number": torch.tensor(7),
    }
    write_tensors(path, tensors)
    read = load_file(path)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_a_disk_that_takes_no_more_is_told(path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_tensors(path, {"rows": torch.zeros(1 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)

"""Real processes, started by torchrun. What is checked on them is in on_ranks.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from millionway.parallel.group import Group
from millionway.parallel.row_shards import load_shards


def torchrun(size: int, *command: str, **options) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}  # says where a rank was aborted
    return subprocess.run([*launcher, *command], capture_output=True, text=True, env=environment, **options)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_do_together_what_one_does_alone(size: int, shards: Path) -> None:
    """Later sizes also read the shards of the earlier ones."""
    folder = shards / f"ranks_{size}"
    folder.mkdir()
    done = torchrun(size, str(Path(__file__).parent / "on_ranks.py"), str(folder))
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert done.stdout.count("all well") == size
    for num in (37, 3):
        loaded = {"rows": torch.zeros(num, 4), "hardest": torch.zeros(num, 2, dtype=torch.int32)}
        load_shards(loaded, folder / f"{num}", Group(), num)
        assert torch.equal(loaded["rows"], torch.arange(num * 4.0).view(num, 4))
        assert torch.equal(loaded["hardest"], torch.arange(num * 2).view(num, 2).int())

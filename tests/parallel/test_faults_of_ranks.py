"""What goes wrong on one rank ends all of them, by themselves: no launcher is there to end them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_runs import SETTINGS, wait_until


def ends(fault: str, victim: str, data: Path, out: Path) -> list[tuple[int, str]]:
    """(exit code, messages) of two ranks that wait for each other for hours, if need be."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, str(Path(__file__).parent / "with_fault.py"), fault, victim, "pretrain", *SETTINGS]
    command += ["--data", str(data), "--out", str(out), "--timeout", "7200"]
    said = [out.with_name(f"rank-{rank}.txt") for rank in range(2)]
    ranks = []
    try:
        for rank, path in enumerate(said):
            environment = {**here, "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with path.open("w") as file:
                ranks.append(subprocess.Popen(command, stderr=file, env=environment))
        wait_until(lambda: all(rank.poll() is not None for rank in ranks))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, path.read_text()) for rank, path in zip(ranks, said)]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("fault", ["no_folder", "no_third_step", "no_backward", "no_classifier", "no_log"])
def test_an_error_on_one_rank_ends_all(fault: str, victim: int, tmp_path: Path, digit_folder: Path) -> None:
    ended = ends(fault, str(victim), digit_folder, tmp_path / "run")
    for code, words in ended:
        assert code not in (0, -9), words
    assert "planted" in ended[victim][1]
    other = ended[1 - victim][1]
    assert other.count("millionway: ") == 1 and "Traceback" not in other, other
    if fault != "no_log":  # there nobody could tell the others
        assert f"rank {victim}" in other and "planted" in other
    assert f"rank {1 - victim} stopped" in other or fault == "no_classifier", other


@pytest.mark.slow
def test_on_cpus_no_rank_asks_for_a_gpu(tmp_path: Path, digit_folder: Path) -> None:
    for code, words in ends("any_cuda", "all", digit_folder, tmp_path / "run"):
        assert code == 0, words

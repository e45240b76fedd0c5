"""Two hosts: network namespaces on this machine, joined by a cable that is cut in mid-run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_runs import SETTINGS, assert_same_end, command, ranks_of, wait_until

ADDRESSES = ("10.231.77.1", "10.231.77.2")
NAMES = tuple(f"mw{os.getpid()}{side}" for side in "ab")


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    made = []
    try:
        for name in NAMES:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", f"{NAMES[0]}v", "netns", NAMES[0], "type", "veth", "peer", f"{NAMES[1]}v", "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES):
            ip("-n", name, "address", "add", f"{address}/24", "dev", f"{name}v")
            ip("-n", name, "link", "set", f"{name}v", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield NAMES
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def start(host: str, number: int, data: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    launcher = ("--nnodes=2", f"--node-rank={number}", f"--master-addr={ADDRESSES[0]}", "--master-port=29517")
    arguments = ["--data", str(data), "--out", str(out), *SETTINGS, "--timeout", "6", *more]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": f"{host}v", "TORCH_GLOO_LAZY_INIT": "0"}
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *command(1, *arguments, launcher=launcher)],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def end(processes: list[subprocess.Popen[str]], out: Path) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
    for pid in ranks_of(out):
        os.kill(pid, signal.SIGKILL)


def said_until(machine: subprocess.Popen[str], words: str) -> str:
    """The line with these words."""
    assert machine.stderr is not None
    said = ""
    while line := machine.stderr.readline():
        said += line
        if words in line:
            return line
    raise AssertionError(said[-4000:])


@pytest.mark.slow
@pytest.mark.root
def test_a_cut_cable_is_told_and_the_run_goes_on(hosts: tuple[str, str], tmp_path: Path, digit_folder: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    machines = [start(host, number, digit_folder, whole) for number, host in enumerate(hosts)]
    try:
        outcome = [machine.communicate()[1] for machine in machines]
    finally:
        end(machines, whole)
    assert [machine.returncode for machine in machines] == [0, 0], outcome

    machines = [start(host, number, digit_folder, cut) for number, host in enumerate(hosts)]
    try:
        wait_until(
            lambda: (
                (cut / "checkpoints" / "step_00000004").exists()
                or any(machine.poll() is not None for machine in machines)
            )
        )
        ip("-n", hosts[1], "link", "set", f"{hosts[1]}v", "down")
        # The launchers would wait for each other for minutes; what the ranks say comes after --timeout.
        for machine in machines:
            said = said_until(machine, "because of another one")
            assert "pretrain --resume --out" in said
    finally:
        end(machines, cut)

    ip("-n", hosts[1], "link", "set", f"{hosts[1]}v", "up")
    time.sleep(1)
    machines = [start(host, number, digit_folder, cut, "--resume") for number, host in enumerate(hosts)]
    try:
        outcome = [machine.communicate()[1] for machine in machines]
    finally:
        end(machines, cut)
    assert [machine.returncode for machine in machines] == [0, 0], outcome
    assert "going on from" in outcome[0]
    assert_same_end(cut, whole)


if sys.platform != "linux":
    pytest.skip("network namespaces are Linux's", allow_module_level=True)

"""How much memory there is: on Linux, in containers, on macOS, for several ranks; each faked by files or programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from millionway import machine
from millionway.model.rows import default_keep_bytes

GIB = 1 << 30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 64 GiB, of which 40 are free."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {40 << 20} kB\n")
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    sizes = {"SC_PHYS_PAGES": 16 << 20, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", lambda name: sizes[name])  # no SC_AVPHYS_PAGES, as on macOS
    return tmp_path


def put_group(folder: Path, limit: str, used: str, names: tuple[str, str], cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(used + "\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")


def test_without_limits_it_is_the_machines(system: Path) -> None:
    assert machine.memory_bytes() == 64 * GIB
    assert machine.free_memory_bytes() == 40 * GIB


def test_a_container_has_its_limit(system: Path) -> None:
    names = ("memory.max", "memory.current")
    (system / "proc" / "self" / "cgroup").write_text("0::/pods/a\n")
    put_group(system / "cgroup" / "pods" / "a", "max", "0", names)
    put_group(system / "cgroup" / "pods", str(8 * GIB), str(6 * GIB), names, cache=GIB)  # the outer one limits
    assert machine.memory_bytes() == 8 * GIB
    assert machine.free_memory_bytes() == 3 * GIB
    put_group(system / "cgroup" / "pods", str(8 * GIB), str(9 * GIB), names)
    assert machine.free_memory_bytes() == 0


def test_a_container_sees_its_own_group_as_the_root(system: Path) -> None:
    """Kubernetes: /proc names a path of the host, and the files are at the top."""
    (system / "proc" / "self" / "cgroup").write_text("0::/kubepods/pod1/c2\n")
    put_group(system / "cgroup", str(4 * GIB), str(GIB), ("memory.max", "memory.current"))
    assert machine.memory_bytes() == 4 * GIB and machine.free_memory_bytes() == 3 * GIB


def test_the_first_version_of_control_groups(system: Path) -> None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (system / "proc" / "self" / "cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/docker/b\n0::/\n")
    put_group(system / "cgroup" / "memory" / "docker" / "b", str(2 * GIB), str(GIB), names, cache=GIB // 2)
    put_group(system / "cgroup" / "memory", str(2**63 - 4096), str(9 * GIB), names)  # no limit
    assert machine.memory_bytes() == 2 * GIB
    assert machine.free_memory_bytes() == GIB + GIB // 2


def test_macos_is_asked_by_vm_stat(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (system / "proc" / "meminfo").unlink()
    program = system / "vm_stat"
    told = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free: 100.\nPages active: 7.\n"
    program.write_text(f"#!/bin/sh\nprintf '{told}Pages inactive: 50.\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{system}:{os.environ['PATH']}")
    assert machine.free_memory_bytes() == 150 * 16384
    program.write_text("#!/bin/sh\nexit 1\n")
    assert machine.free_memory_bytes() == 32 * GIB  # unknown: half


def test_the_ranks_of_a_machine_share_its_memory(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_keep_bytes(torch.device("cpu")) == 10 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert machine.num_local_ranks() == 8
    assert default_keep_bytes(torch.device("cpu")) == 10 * GIB // 8


FAULTS = """
import resource, sys, torch
from millionway import machine
if sys.argv[1] == "kept":
    machine.keep_freed_memory()
def step():
    return [torch.ones(int(15e6)) for _ in range(4)]  # 60 MB each, as activations of large views are
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    """By how often the system is asked for a page."""
    command = [sys.executable, "-c", FAULTS]
    given_back, kept = (int(subprocess.check_output([*command, which])) for which in ("given back", "kept"))
    assert kept < given_back / 2


@pytest.mark.parametrize(
    ("known", "expected"), [({"avx512_bf16": True}, True), ({"amx_bf16": True}, True), ({}, False)]
)
def test_a_processor_says_what_it_has_instructions_for(
    monkeypatch: pytest.MonkeyPatch, known: dict, expected: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    assert machine.has_bfloat16(torch.device("cpu")) is expected
    assert not machine.has_bfloat16(torch.device("mps"))


@pytest.mark.parametrize(("generation", "expected"), [((7, 0), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_has_bfloat16_from_a100_on(
    monkeypatch: pytest.MonkeyPatch, generation: tuple[int, int], expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: generation)
    assert machine.has_bfloat16(torch.device("cuda")) is expected

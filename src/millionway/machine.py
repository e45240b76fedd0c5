"""What a run runs on: devices, cores, memory, versions."""

import ctypes
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
KEPT_BYTES = (1 << 25, 1 << 28)  # malloc's own threshold, which follows what is freed, ends where this begins
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def choose_device(name: str, number: int = 0) -> torch.device:
    """auto: CUDA, else Apple's GPU, else the CPU. A device that is not there is refused. number: which of the GPUs."""
    if name == "cpu":  # no question to a driver
        return torch.device("cpu")
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, is_there in there.items() if is_there)
    if not there.get(name, False):
        raise ValueError(f"--device {name}: there is none here. Use --device cpu or leave it out.")
    return torch.device(name, number) if name == "cuda" else torch.device(name)


def has_bfloat16(device: torch.device) -> bool:
    """Whether it has instructions for products in bfloat16. Without them they are many times slower than in float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    known = processor() if device.type == "cpu" else {}
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def processor() -> dict[str, Any]:
    """Its name and the instructions that it has; nothing where torch cannot tell."""
    return getattr(torch.cpu, "get_capabilities", dict)()


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(device: str, threads: int | None) -> tuple[torch.device, int]:
    """(device, threads) for a verb that computes; torch is told how many threads it has."""
    num_threads = threads or num_cores()
    torch.set_num_threads(num_threads)
    keep_freed_memory()
    return choose_device(device), num_threads


def num_local_ranks() -> int:
    """How many processes of a run share this machine; torchrun says so."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_bytes() -> int:
    """Of the machine, or of the container this process runs in."""
    return min([_physical_bytes(), *(limit for limit, _ in _cgroups())])


def free_memory_bytes() -> int:
    """What programs can still get, here or in the container; what is used as a cache counts, as it is given back."""
    return max(0, min([_available_bytes(), *(limit - used for limit, used in _cgroups())]))


def keep_freed_memory() -> None:
    """Let malloc keep what a step frees for the next one: to ask the system for it anew adds 7 to 21 % to a step
    (`benchmarks/encoder_step.py`).

    Of glibc alone. A part of what is free is the most that is kept, so that others get what they need.
    """
    if sys.platform != "linux":
        return
    least, most = KEPT_BYTES
    most = min(most, free_memory_bytes() // (8 * num_local_ranks()))
    library = ctypes.CDLL(None)
    if most >= least and hasattr(library, "mallopt"):
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            library.mallopt(option, most)


def _physical_bytes() -> int:
    if not hasattr(os, "sysconf"):
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _available_bytes() -> int:
    """Linux and macOS tell; elsewhere it is guessed to be half of all."""
    try:
        lines = (PROC / "meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    except (OSError, StopIteration):
        pass
    try:
        told = subprocess.run(["vm_stat"], capture_output=True, text=True, check=True).stdout
        page_bytes = int(re.findall(r"page size of (\d+) bytes", told)[0])
        pages = re.findall(r"^Pages (?:free|inactive|speculative): +(\d+)", told, re.MULTILINE)
        return page_bytes * sum(map(int, pages))
    except (OSError, subprocess.CalledProcessError, IndexError):
        return _physical_bytes() // 2


def _cgroups() -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of each control group this process is in, the outer ones included: version 1 and 2."""
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            root, files = CGROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, files = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = Path(name.lstrip("/"))
        for each in (folder, *folder.parents):  # in a container the own group is the root, whatever its name
            try:
                limit, used = ((root / each / file).read_text().strip() for file in files)
                cache = re.findall(r"^inactive_file (\d+)", (root / each / "memory.stat").read_text(), re.MULTILINE)
            except OSError:
                continue
            if limit != "max":
                yield int(limit), int(used) - sum(map(int, cache))


def describe_environment(device: torch.device) -> str:
    """JSON with all that another person needs to see why their numbers differ."""
    packages = ("torch", "torchvision", "timm", "numpy", "pillow", "safetensors", "pyarrow")
    facts = {
        "millionway": version("millionway"),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else None,
    }
    return json.dumps(facts, indent=2) + "\n"


def _commit() -> str | None:
    """The commit of millionway's own checkout, if it runs from one."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
    # Of the package, not of results, of which it carries those of its presets.
    changes = ["git", "-C", str(folder), "status", "--porcelain", "--", ".", ":!settings/measured.json"]
    try:
        inside = subprocess.run(["git", "-C", str(folder), "ls-files", __file__], capture_output=True, text=True)
        if not inside.stdout:
            return None
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(changes, capture_output=True, text=True, check=True).stdout
        return f"{commit}-dirty" if changed else commit
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()

"""What a run ran on: devices, threads, versions."""

import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch


def choose_device(name: str, number: int = 0) -> torch.device:
    """auto: CUDA, else Apple's GPU, else the CPU. A device that is not there is refused. number: which of the GPUs."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, is_there in there.items() if is_there)
    if not there.get(name, False):
        raise ValueError(f"--device {name}: there is none here. Use --device cpu or leave it out.")
    return torch.device(name, number) if name == "cuda" else torch.device(name)


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(device: str, threads: int | None) -> tuple[torch.device, int]:
    """(device, threads) for a verb that computes; torch is told how many threads it has."""
    num_threads = threads or num_cores()
    torch.set_num_threads(num_threads)
    return choose_device(device), num_threads


def free_memory_bytes() -> int:
    """What programs can still get; Linux also gives back what it uses as cache."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


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
    changes = ["git", "-C", str(folder), "status", "--porcelain", "--", "."]  # of the package, not of its results
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

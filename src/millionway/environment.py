"""What a run ran on: devices, threads, versions."""

import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch


def choose_device(name: str) -> torch.device:
    """auto: CUDA, else Apple's GPU, else the CPU. A device that is not there is refused."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, is_there in there.items() if is_there)
    if not there.get(name, False):
        raise ValueError(f"--device {name}: there is none here. Use --device cpu or leave it out.")
    return torch.device(name)


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        inside = subprocess.run(["git", "-C", str(folder), "ls-files", __file__], capture_output=True, text=True)
        if not inside.stdout:
            return None
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()

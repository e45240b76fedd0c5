"""Many steps: do memory and open files stay as they are?

Sizes after a tenth of the run and at its end.
"""

import os
import statistics
import time
from pathlib import Path

import scene

MUST = "flat within 2 %"
NUM_STEPS = 20_000


def measure(folder: Path, short: bool) -> dict:
    num_steps = 300 if short else NUM_STEPS
    images = ["--data", str(scene.data), "--labels", "none", "--batch-size", "4", *scene.MODEL, *scene.TINY]
    epochs = num_steps * 4 // scene.NUM_IMAGES + 1
    steps = ["--epochs", str(epochs), "--log-every", "10", "--eval-every", str(epochs), "--hardest", "0"]
    options = ["--save-every", str(num_steps // 20), "--out", str(folder / "run")]
    child = scene.Child(["pretrain", *images, *steps, *options], folder / "said")
    seen = []
    while child.poll() is None:
        step = _step(folder / "run" / "metrics.jsonl")
        if step and (not seen or step > seen[-1][0]):
            seen.append((step, *_sizes(child.pid)))
        time.sleep(0.2)
    assert child.code == 0, child.words
    # Medians, since a checkpoint under way takes some of both.
    first, last = (
        [
            statistics.median(each[n] for each in seen if each[1] and low <= each[0] / num_steps <= high)
            for n in range(3)
        ]
        for low, high in ((0.1, 0.2), (0.9, 1.1))
    )
    growth = [last[n] / first[n] - 1 for n in (1, 2)]
    result = f"{num_steps:,} steps: memory {growth[0]:+.1%} ({first[1] / 1024:.0f} to {last[1] / 1024:.0f} MB), "
    result += f"open files {first[2]:g} to {last[2]:g}"
    return {"result": result, "passed": all(g <= 0.02 for g in growth), "growth": growth, "steps": num_steps}


def _step(path: Path) -> int:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 400))
            return int(file.read().rsplit(b'"step": ', 1)[1].split(b",")[0])
    except (OSError, IndexError, ValueError):
        return 0


def _sizes(pid: int) -> tuple[int, int]:
    """(resident KiB, open files)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        return resident, len(os.listdir(f"/proc/{pid}/fd"))
    except (OSError, StopIteration):
        return 0, 0

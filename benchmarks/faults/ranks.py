"""One of 2 or 3 ranks is killed at a random moment: does torchrun start them again, to the same bits?

Ranks are processes of torchrun, which starts all again after a failure (--max-restarts).
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import scene

MUST = "all end with the same bits"
NUM = 30


def measure(folder: Path, short: bool) -> dict:
    num, good, kills, wrong = 2 if short else NUM, 0, 0, []
    wanted = {}
    for number in range(num):
        if scene.time_is_up():
            num = number
            break
        size, chance = 2 + number % 2, random.Random(number)
        if size not in wanted:
            started = time.monotonic()
            run, words, _ = _train(folder / f"whole{size}", size, None, chance)
            wanted[size] = scene.bits(run), time.monotonic() - started, words
        run, words, killed = _train(folder / f"run{number}", size, wanted[size][1], chance)
        kills += killed
        problem = "" if (run / "report.html").exists() else words[-1500:]
        if not problem and scene.bits(run) != wanted[size][0]:
            problem = "other bits"
        good += not problem
        wrong += [f"{run.name}, {size} ranks: {problem}"] if problem else []
        scene.remove(run)
    result = f"{good} of {num} runs of 2 and 3 ranks, {kills} kills"
    return {"result": result, "passed": not wrong, "runs": num, "kills": kills, "wrong": wrong}


def _train(run: Path, size: int, seconds: float | None, chance: random.Random) -> tuple[Path, str, int]:
    """seconds: how long it takes; a rank is killed within them. Returns the folder, what was said, kills."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", "--max-restarts=3"]
    args = [*scene.start(run, scene.QUICK_TO_IMPORT), "--timeout", "120"]
    command = [sys.executable, *launcher, "-m", "millionway", *args]
    with open(f"{run}.said", "w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        killed = 0
        if seconds is not None:
            time.sleep(chance.uniform(0.4, 1.0) * seconds)
            ranks = _children(process.pid)
            if ranks and process.poll() is None:
                os.kill(chance.choice(ranks), signal.SIGKILL)
                killed = 1
        process.wait()
    return run, Path(f"{run}.said").read_text(errors="replace"), killed


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(word) for word in task.read_text().split()]
    return found

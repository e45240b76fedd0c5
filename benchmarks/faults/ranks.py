"""One of 2 or 3 ranks is killed at a random moment: does torchrun start them again, to the same bits?

Ranks are processes of torchrun, which starts all again after a failure (--max-restarts).
"""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import scene

MUST = "all end with the same bits"
NUM = 30
WITHIN = 0.3, 0.95  # of the work of a run that is left alone; before that Python is importing


def measure(folder: Path, short: bool) -> dict:
    num, good, kills, wrong = 2 if short else NUM, 0, 0, []
    wanted = {}
    for number in range(num):
        if scene.time_is_up():
            num = number
            break
        size, chance = 2 + number % 2, random.Random(number)
        if size not in wanted:
            run = folder / f"whole{size}"
            wanted[size] = _train(run, size, chance)[1], scene.bits(run)
        work, bits = wanted[size]
        run = folder / f"run{number}"
        words, _, killed = _train(run, size, chance, chance.uniform(*WITHIN) * work)
        kills += killed
        problem = "" if (run / "report.html").exists() else words[-1500:]
        if not problem and scene.bits(run) != bits:
            problem = "other bits"
        good += not problem
        wrong += [f"{run.name}, {size} ranks: {problem}"] if problem else []
        scene.remove(run)
    result = f"{good} of {num} runs of 2 and 3 ranks, {kills} kills"
    return {"result": result, "passed": not wrong, "runs": num, "kills": kills, "wrong": wrong}


def _train(run: Path, size: int, chance: random.Random, moment: float | None = None) -> tuple[str, float, bool]:
    """moment: when the ranks have worked so many seconds one of them is killed.

    Returns what was said, how long the ranks worked, and whether one was killed.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", "--max-restarts=3"]
    args = [*scene.start(run, scene.QUICK_TO_IMPORT), "--timeout", "120"]
    command = [sys.executable, *launcher, "-m", "millionway", *args]
    work, killed = 0.0, False
    with open(f"{run}.said", "w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        while process.poll() is None:
            ranks = _children(process.pid)
            work = max(work, sum(scene.work_of(rank) for rank in ranks))
            if moment is not None and work >= moment and ranks and not killed:
                os.kill(chance.choice(ranks), signal.SIGKILL)
                killed = True
            time.sleep(0.01)
    return Path(f"{run}.said").read_text(errors="replace"), work, killed


def _children(pid: int) -> list[int]:
    found = []
    with suppress(OSError):  # it has just ended
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(word) for word in task.read_text().split()]
    return found

"""Does a run that is killed at random moments, and gone on with, end with the bits of one that was left alone?

kill -9 most of all; also SIGTERM, SIGHUP, and SIGSTOP with SIGCONT.
"""

import random
import signal
import time
from pathlib import Path

import scene

MUST = "all end with the same bits"
SIGNALS = {"SIGKILL": 100, "SIGTERM": 10, "SIGHUP": 10, "SIGSTOP": 10}


def measure(folder: Path, short: bool) -> dict:
    _, wanted, seconds = scene.whole_run(folder)
    counts, num_signals, wrong = {}, 0, []
    for name, num in SIGNALS.items():
        num = 2 if short else num
        good = 0
        for number in range(num):
            chance = random.Random(f"{name} {number}")

            def harm(child: scene.Child, name: str = name, chance: random.Random = chance) -> None:
                nonlocal num_signals
                time.sleep(chance.uniform(0, 1.1 * seconds))
                num_signals += child.poll() is None
                child.send(getattr(signal, name))
                if name == "SIGSTOP":
                    time.sleep(chance.uniform(0, 0.3))
                    child.send(signal.SIGCONT)

            run = folder / f"{name}{number}"
            problem = scene.until_done(run, folder, chance, harm)
            if not problem and scene.bits(run) != wanted:
                problem = "other bits"
            good += not problem
            wrong += [f"{run.name}: {problem}"] if problem else []
            scene.remove(run)
        counts[name] = [good, num]
    numbers = {"runs": counts, "signals": num_signals, "wrong": wrong}
    words = ", ".join(f"{name} {good} of {num}" for name, (good, num) in counts.items())
    return {"result": f"{words}; {num_signals} signals", "passed": not wrong, **numbers}

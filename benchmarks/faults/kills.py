"""Does a run that is killed at random moments, and gone on with, end with the bits of one that was left alone?

kill -9 most of all; also SIGTERM, SIGHUP, and SIGSTOP with SIGCONT. Some runs are started from the command line, the
others forked.
"""

import random
import signal
import time
from pathlib import Path

import scene

MUST = "all end with the same bits"
SIGNALS = {"SIGKILL": 70, "SIGTERM": 10, "SIGHUP": 10, "SIGSTOP": 10}
REAL = 20  # one in so many is started from the command line


def measure(folder: Path, short: bool) -> dict:
    _, wanted, work = scene.whole_run(folder)
    works = {False: work, True: work if short else _work_from_the_start(folder)}
    cases = [(name, number) for name, num in SIGNALS.items() for number in range(2 if short else num)]
    random.Random(0).shuffle(cases)
    counts, num_signals, num_real, wrong = {name: [0, 0] for name in SIGNALS}, 0, 0, []
    for place, (name, number) in enumerate(cases):
        if scene.time_is_up():
            break
        chance, real, run = (
            random.Random(f"{name} {number}"),
            not short and place % REAL == 0,
            folder / f"{name}{number}",
        )

        def harm(child: scene.Child, name: str = name, chance: random.Random = chance, real: bool = real) -> None:
            nonlocal num_signals
            moment = chance.uniform(0, 1.1 * works[real])
            child.wait(lambda: child.work >= moment)
            num_signals += child.poll() is None
            child.send(getattr(signal, name))
            if name == "SIGSTOP":
                time.sleep(chance.uniform(0, 0.3))
                child.send(signal.SIGCONT)

        problem = scene.until_done(run, folder, chance, harm, real)
        if not problem and scene.bits(run) != wanted:
            problem = "other bits"
        num_real += real
        counts[name][0] += not problem
        counts[name][1] += 1
        wrong += [f"{run.name}: {problem}"] if problem else []
        scene.remove(run)
    words = ", ".join(f"{name} {good} of {num}" for name, (good, num) in counts.items())
    result = f"{words} runs; {num_signals} signals; {num_real} runs from the command line"
    return {"result": result, "passed": not wrong, "runs": counts, "signals": num_signals, "wrong": wrong}


def _work_from_the_start(folder: Path) -> float:
    (folder / "real").mkdir()
    return scene.whole_run(folder / "real", real=True)[2]

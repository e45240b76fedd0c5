"""Two machines, one rank each, with a bad network between them: right numbers, or a clear end in time?

Packets are delayed and overtake each other, are doubled, lost, or all lost from some moment on.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cable
import scene

MUST = "the same bits; after a cut, one clear line within twice --timeout"
TIMEOUT = 30  # seconds, of the run
BAD = {
    "delayed by 40 ms": {"delay": 0.04},
    "10 % doubled": {"doubled": 0.1},
    "5 % lost": {"lost": 0.05},
    "cut": {},
}


def measure(folder: Path, short: bool) -> dict:
    problem = cable.why_not()
    if problem:
        return {"result": f"not run: {problem}", "passed": None}
    words, wrong = [], []
    with cable.Cable() as between:
        said, codes, _ = _train(folder / "good", between, False)
        assert codes == [0, 0], said
        wanted = scene.bits(folder / "good")
        for name, how in list(BAD.items())[-1 if short else 0 :]:
            if scene.time_is_up():
                break
            run = folder / name.replace(" ", "_")
            between.be(**how)
            said, codes, seconds = _train(run, between, not how)
            if how:
                right = codes == [0, 0] and scene.bits(run) == wanted
                words.append(f"{name}: {'the same bits' if right else 'wrong'}")
            else:
                right = seconds < 2 * TIMEOUT and all(map(_is_clear, said))
                words.append(f"{name}: {'a clear line' if right else 'wrong'} after {seconds:.0f} s")
            wrong += [] if right else [f"{name}: exit codes {codes} after {seconds:.0f} s; {' '.join(said)[-1500:]}"]
    return {"result": "; ".join(words), "passed": not wrong, "timeout": TIMEOUT, "wrong": wrong}


def _train(run: Path, between: cable.Cable, with_cut: bool) -> tuple[list[str], list[int | None], float]:
    """(what each rank said, exit codes of torchrun, seconds to the end, from the cut if there is one)."""
    more = ["--timeout", str(TIMEOUT)] + (["--epochs", "100000", "--save-every", "50"] if with_cut else [])
    args = ["-m", "millionway", *scene.start(run, scene.QUICK_TO_IMPORT), *more]
    said = [Path(f"{run}.{rank}.said") for rank in range(2)]
    processes = []
    for rank, host in enumerate(between.hosts):
        where = ["--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1", "--master-addr=10.231.7.1"]
        command = ["ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run", *where, *args]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": cable.NAME}
        with open(said[rank], "w") as file:
            options = {"stdout": file, "stderr": file, "env": environment, "start_new_session": True}
            processes.append(subprocess.Popen(command, **options))
    try:
        if with_cut:
            _wait_for_steps(run, processes)
            between.be(lost=1.0)
        began = time.monotonic()
        # torchrun's own goodbye to the other machine takes minutes; after a cut the ranks' last words are what counts.
        while any(process.poll() is None for process in processes) and not (
            with_cut and (all(map(_is_clear, _texts(said))) or time.monotonic() > began + 4 * TIMEOUT)
        ):
            time.sleep(0.2)
        return _texts(said), [process.poll() for process in processes], time.monotonic() - began
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        between.be()


def _texts(said: list[Path]) -> list[str]:
    return [path.read_text(errors="replace") for path in said]


def _wait_for_steps(run: Path, processes: list[subprocess.Popen]) -> None:
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 20):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.1)


def _is_clear(text: str) -> bool:
    return "millionway: " in text and "Go on with: " in text

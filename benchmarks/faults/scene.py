"""A small run to do harm to, processes to do it in, and what must come out of it.

Processes are forked from this one, where everything is imported already: a run of seconds would else wait for imports.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
IMAGES = ["--data", "digits", "--max-images", "96", "--image-size", "8", "--threads", "1"]
RUN = [*IMAGES, *("--epochs", "3", "--batch-size", "32", "--save-every", "1", "--log-every", "1", "--keep", "2")]
AT_END: list[Callable[[], object]] = []  # what a child does after its command
CLEAR = (1, 2, 130)  # exit codes with one line that says why


def prepare(folder: Path) -> None:
    """One thread and caches of its own. Imports everything that a run needs, once.

    The curves of the report are not drawn: they take longer than the run.
    """
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", MPLBACKEND="agg")
    for name in ("FEATURES", "INDEX", "PIXELS"):
        os.environ[f"MILLIONWAY_{name}"] = str(folder / "caches")
    import sklearn.datasets
    import torch
    import torch.utils.tensorboard

    import millionway.evaluation.protocols
    import millionway.train.run  # noqa: F401
    from millionway.reporting import page

    page.line_chart = lambda *data, **options: ""
    torch.set_num_threads(1)
    sklearn.datasets.load_digits()


class Child:
    """A command line in a forked process; what it prints goes to a file."""

    def __init__(self, args: list[str], said: Path, first: Callable[[], object] = lambda: None) -> None:
        self.said, self.code = said, None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(args, said, first)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, seconds: float = 1e9) -> int | None:
        """The exit code; None if it is still at work after so many seconds."""
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        return self.code

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    @property
    def words(self) -> str:
        return self.said.read_text(errors="replace") if self.said.exists() else ""


def _become(args: list[str], said: Path, first: Callable[[], object]) -> None:
    """Never returns."""
    code = 70
    try:
        os.setpgid(0, 0)
        file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        from millionway.cli import main

        first()
        code = main(args)
        for last in AT_END:
            last()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start(run: Path) -> list[str]:
    return ["pretrain", *RUN, "--out", str(run)]


def resume(run: Path) -> list[str]:
    return ["pretrain", "--resume", "--out", str(run)]


def go_on(run: Path, chance: random.Random) -> list[str]:
    """What a person may type after a failure."""
    if (run / "config.json").exists():
        return resume(run)
    if (run / "starting.json").exists():
        return chance.choice([resume, start])(run)
    return start(run)


def bits(run: Path) -> str:
    """Of all that a run computes: weights, rows, momentum, and the losses of all steps."""
    import torch
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    newest = (run / "checkpoints" / "last").read_text().split()[0]
    files = [run / "encoder.safetensors", *sorted((run / "checkpoints" / newest).rglob("*.safetensors"))]
    for path in files:
        for name, tensor in sorted(load_file(path).items()):
            digest.update(f"{path.relative_to(run)} {name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    for text in (run / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        digest.update(repr([line.get(name) for name in ("kind", "step", "loss", "instance_top1", "knn_20")]).encode())
    return digest.hexdigest()


def whole_run(folder: Path) -> tuple[Path, str, float]:
    """(a run that nothing happened to, its bits, seconds)."""
    run, started = folder / "whole", time.monotonic()
    child = Child(start(run), folder / "whole.said")
    assert child.wait() == 0, child.words
    return run, bits(run), time.monotonic() - started


def is_clear(child: Child) -> bool:
    """One line that says why, and no traceback."""
    last = child.words.strip().splitlines()[-1:] or [""]
    return child.code in CLEAR and "Traceback" not in child.words and last[0].startswith("millionway: ")


def until_done(run: Path, folder: Path, chance: random.Random, harm: Callable[[Child], None] | None = None) -> str:
    """Go on until the run is done, with harm done to each attempt but the last ones; '' or what went wrong."""
    for attempt in range(12):
        child = Child(go_on(run, chance), folder / f"{run.name}.said")
        if harm is not None and attempt < 8:
            harm(child)
        code = child.wait()
        if code == 0:
            return ""
        if code is not None and code > 0 and not is_clear(child):
            return f"exit code {code}: {child.words[-2000:]}"
    return f"not done after many attempts: {child.words[-2000:]}"


def remove(run: Path) -> None:
    shutil.rmtree(run, ignore_errors=True)

"""A small run to do harm to, processes to do it in, and what must come out of it.

Processes are forked from this one, where everything is imported already: a run of seconds would else wait for imports.
"""

import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# The smallest run with all parts: prior, hardest classes, smoothing, k-NN, checkpoints of which old ones go.
STEPS = ["--epochs", "2", "--save-every", "1", "--log-every", "1", "--keep", "2", "--eval-every", "2"]
METHOD = ["--hardest", "3", "--smoothing", "0.2", "--optimizer", "sgd", "--pairs", "0", "--views", "1"]
MODEL = ["--dim", "16", "--image-size", "8", "--threads", "1", "--device", "cpu"]
TINY = ["--encoder", "timm/test_resnet"]
QUICK_TO_IMPORT = ["--encoder", "narrow-resnet", "--stem", "standard"]  # for processes that start anew
NUM_IMAGES, BATCH_SIZE = 24, 12
AT_END: list[Callable[[], object]] = []  # what a child does after its command
CLEAR = (1, 2, 130)  # exit codes with one line that says why
NUM_HARMED = 3  # attempts of a run
data = Path()
ends_at = float("inf")


def time_is_up() -> bool:
    """Whether the minutes that were given for a question are over: then it says how far it came."""
    return time.monotonic() > ends_at


def prepare(folder: Path) -> None:
    """One thread, caches and images of its own. Imports once what a run and the verbs need.

    The curves of the report are not drawn: they take longer than the run.
    """
    global data
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", MPLBACKEND="agg")
    for name in ("FEATURES", "INDEX", "PIXELS"):
        os.environ[f"MILLIONWAY_{name}"] = str(folder / "caches")
    import numpy as np
    import sklearn.datasets
    import torch

    from millionway.reporting import page

    page.line_chart = lambda *data, **options: ""
    torch.set_num_threads(1)
    digits, data = sklearn.datasets.load_digits(), folder / "images.npz"
    pixels = (digits.images[:NUM_IMAGES] * 15.9).astype(np.uint8)
    np.savez(data, images=pixels, labels=digits.target[:NUM_IMAGES])
    _warm_up(folder)


def _warm_up(folder: Path) -> None:
    """Import here what a run imports, and ask each verb once, so that forks find all of it in memory.

    A run itself is not made here: threads of autograd would not live on in a fork.
    """
    from millionway.cli import main, pretrain_settings

    told, run = folder / "modules", folder / "first"
    AT_END.append(lambda: told.write_text("\n".join(sys.modules)))
    child = Child(start(run), folder / "first.said")
    assert child.wait() == 0, child.words
    AT_END.clear()
    for name in told.read_text().split():
        if name not in sys.modules:
            with suppress(Exception):
                importlib.import_module(name)
    pretrain_settings(start(folder / "none")[1:])
    pretrain_settings(resume(run)[1:])
    with open(folder / "verbs.said", "w") as said, redirect_stdout(said), redirect_stderr(said):
        for name, args in verbs(folder / "first-out", run).items():
            assert name == "resume" or main(args) == 0, args


def verbs(out: Path, run: Path) -> dict[str, list[str]]:
    """What can be asked of a run, without and with changes to it; answers go to the folder `out`."""
    out.mkdir(exist_ok=True)
    name, images, one = str(run), ["--data", str(data)], ["--threads", "1", "--device", "cpu"]
    return {
        "embed": ["embed", "--run", name, *images, "--out", str(out / "features.npy"), *one],
        "export": ["export", "--run", name, "--out", str(out / "weights.safetensors")],
        "outliers": ["outliers", "--run", name, "--vectors", "rows", "--out", str(out / "outliers.csv"), *one],
        "knn": ["evaluate", "knn", "--run", name, *images, "--out", str(out), *one],
        "report": ["report", "--run", name],
        "resume": resume(run),
    }


class Child:
    """A command line in a process: forked from this one, or (real) started anew. What it prints goes to a file."""

    def __init__(
        self, args: list[str], said: Path, first: Callable[[], object] = lambda: None, real: bool = False
    ) -> None:
        self.said, self.code = said, None
        sys.stdout.flush()
        sys.stderr.flush()
        if real:
            with open(said, "w") as file:
                command = [sys.executable, "-m", "millionway", *args]
                self.process = subprocess.Popen(command, stdout=file, stderr=file, process_group=0)
            self.pid = self.process.pid
            return
        self.pid = os.fork()
        if self.pid == 0:
            _become(args, said, first)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, until: Callable[[], bool] = lambda: False) -> int | None:
        """The exit code; None if it is still at work when something is so."""
        while self.poll() is None and not until():
            time.sleep(0.002)
        return self.code

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    @property
    def work(self) -> float:
        return work_of(self.pid)

    @property
    def words(self) -> str:
        return self.said.read_text(errors="replace") if self.said.exists() else ""


def work_of(pid: int) -> float:
    """Seconds of a core that a process has used so far. A moment by this clock is the same on a busy machine."""
    with suppress(OSError, IndexError):
        return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
    return 0.0


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


def start(run: Path, encoder: list[str] = TINY, batch_size: int = BATCH_SIZE) -> list[str]:
    images = ["--data", str(data), "--batch-size", str(batch_size)]
    return ["pretrain", *images, *STEPS, *METHOD, *MODEL, *encoder, "--out", str(run)]


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
    newest = (run / "checkpoints" / "last").read_text().strip()
    files = [run / "encoder.safetensors", *sorted((run / "checkpoints" / newest).rglob("*.safetensors"))]
    for path in files:
        for name, tensor in sorted(load_file(path).items()):
            digest.update(f"{path.relative_to(run)} {name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    for text in (run / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        digest.update(repr([line.get(name) for name in ("kind", "step", "loss", "instance_top1", "knn_20")]).encode())
    return digest.hexdigest()


def whole_run(folder: Path, real: bool = False) -> tuple[Path, str, float]:
    """(a run that nothing happened to, its bits, seconds of work)."""
    run, work = folder / "whole", 0.0
    child = Child(start(run), folder / "whole.said", real=real)
    while child.poll() is None:
        work = max(work, child.work)
        time.sleep(0.01)
    assert child.code == 0, child.words
    return run, bits(run), work


def is_clear(child: Child) -> bool:
    """One line that says why, and no traceback."""
    last = child.words.strip().splitlines()[-1:] or [""]
    return child.code in CLEAR and "Traceback" not in child.words and last[0].startswith("millionway: ")


def until_done(
    run: Path, folder: Path, chance: random.Random, harm: Callable[[Child], None] | None = None, real: bool = False
) -> str:
    """Go on until the run is done, with harm done to the first attempts; '' or what went wrong."""
    for attempt in range(NUM_HARMED + 2):
        child = Child(go_on(run, chance), folder / f"{run.name}.said", real=real)
        if harm is not None and attempt < NUM_HARMED:
            harm(child)
        code = child.wait()
        if code == 0:
            return ""
        if code is not None and code > 0 and not is_clear(child):
            return f"exit code {code}: {child.words[-2000:]}"
    return f"not done after {NUM_HARMED + 2} attempts: {child.words[-2000:]}"


def remove(run: Path) -> None:
    shutil.rmtree(run, ignore_errors=True)

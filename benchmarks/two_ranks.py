"""Are two ranks on two cores as fast as one process with both? Whole runs, from files to moved rows, in turns.

    python benchmarks/two_ranks.py --data CIFAR10/train

Each side is the command that a user types, with the preset cifar10-small on all images, ended after some steps; the
speed is the median of what the run itself logs, the first lines left out.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from presets import write_between_marks

from millionway.machine import describe_environment
from millionway.reporting.metrics import read_metrics

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "two_ranks.json"
LOG_EVERY, LINES, LEFT_OUT = 20, 10, 2
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
SIDES = {
    "one process": [sys.executable, "-m", "millionway"],
    "two ranks": [sys.executable, *LAUNCHER, "-m", "millionway"],
}


def speeds(run: Path) -> list[float]:
    return [line["images_per_second"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "step"]


def measure(command: list[str], data: str, run: Path) -> float:
    args = ["pretrain", "--preset", "cifar10-small", "--data", data, "--labels", "none", "--log-every", str(LOG_EVERY)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with open(f"{run}.said", "w") as said:
        process = subprocess.Popen(
            [*command, *args, "--out", str(run)], stdout=said, stderr=said, start_new_session=True, env=environment
        )
        while len(speeds(run)) < LINES and process.poll() is None:
            time.sleep(0.5)
        found = speeds(run)[:LINES]
        process.send_signal(signal.SIGINT)  # torchrun passes it on, and its ranks end; they have a session of their own
        process.wait()
    assert len(found) >= LINES, Path(f"{run}.said").read_text()[-2000:]
    return statistics.median(found[LEFT_OUT:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--turns", type=int, default=3)
    chosen = parser.parse_args()
    environment = json.loads(describe_environment(torch.device("cpu")))  # as it begins
    found: dict[str, list[float]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(chosen.turns):
            for name, command in SIDES.items():
                found[name].append(measure(command, chosen.data, Path(folder) / f"{name} {turn}"))
                print(name, found[name][-1], flush=True)
    ratio = statistics.median(one / two for one, two in zip(*found.values()))
    result = {"images_per_second": found, "time of two ranks / time of one process": ratio, "environment": environment}
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    one, two = (statistics.median(values) for values in found.values())
    words = (
        f"Whole runs with the preset cifar10-small on 50,000 images (`benchmarks/two_ranks.py`, {chosen.turns} turns): "
        f"two ranks on two cores take {ratio:.2f} times as long as one with both ({two:.0f} and {one:.0f} images "
        f"a second). Commit {environment['commit']}."
    )
    write_between_marks(ROOT / "docs" / "experiments.md", "two ranks", words)
    print(words)


if __name__ == "__main__":
    main()

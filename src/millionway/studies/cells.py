"""Runs of a study: each in a process of its own, several at a time, none twice.

OUT/base.json              what all runs have in common
OUT/cells/LABEL_sSEED.json the numbers of a finished run
OUT/runs/LABEL_sSEED/      a run that is not finished; it goes on when the study is started again
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millionway.console import Interrupt
from millionway.reporting.metrics import read_metrics
from millionway.studies.grids import Cell
from millionway.train.stops import Interrupted, RunStopped

POLL_SECONDS = 0.5


class CellsFailed(RunStopped):
    """Some runs of a study ended with an error."""


@dataclass
class Job:
    """A cell with a seed."""

    cell: Cell
    seed: int
    out: Path
    process: subprocess.Popen | None = None

    @property
    def label(self) -> str:
        return f"{self.cell.label}_s{self.seed}"

    @property
    def run(self) -> Path:
        return self.out / "runs" / self.label

    @property
    def result(self) -> Path:
        return self.out / "cells" / f"{self.label}.json"

    @property
    def log(self) -> Path:
        return self.out / "runs" / f"{self.label}.log"

    def state(self) -> str:
        """In a few words, for the live table."""
        if self.result.exists():
            return f"k-NN {json.loads(self.result.read_text())['knn_200']:.1%}"
        if self.process is None:
            return "stopped" if self.run.exists() else ""
        if self.process.poll() is not None:
            return "done" if self.process.returncode == 0 else "failed"
        lines = read_metrics(self.run / "metrics.jsonl")
        done = f"epoch {lines[-1]['epoch']:.1f}/{self.cell.settings['epochs']}" if lines else "starting"
        accuracies = [line["knn_200"] for line in lines if "knn_200" in line]
        return f"{done}, k-NN {accuracies[-1]:.1%}" if accuracies else done


def run_jobs(jobs: list[Job], settings: dict[str, Any], at_once: int, num_cores: int, show: Callable[[], None]) -> None:
    """Run what is not finished yet; `show` is called whenever something may have changed.

    settings: those of `millionway.pretrain` that all have in common.
    """
    with Interrupt() as interrupt:
        _run_jobs(jobs, settings, at_once, num_cores, show, interrupt)


def _run_jobs(
    jobs: list[Job],
    settings: dict[str, Any],
    at_once: int,
    num_cores: int,
    show: Callable[[], None],
    interrupt: Interrupt,
) -> None:
    waiting = [job for job in jobs if not job.result.exists()]
    running: list[Job] = []
    failed: list[Job] = []
    threads = max(1, num_cores // at_once)
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                _start(job, {**settings, "threads": threads})
                running.append(job)
            show()
            time.sleep(POLL_SECONDS)
            if interrupt.asked:
                raise Interrupted("stopped; what is finished is kept, and the same command goes on")
            for job in [job for job in running if job.process is not None and job.process.poll() is not None]:
                running.remove(job)
                if not job.result.exists():
                    failed.append(job)
        show()
    except BaseException:
        _stop(running)
        raise
    if failed:
        told = "; ".join(f"{job.label}: {_last_line(job.log)}" for job in failed)
        raise CellsFailed(f"{len(failed)} of {len(jobs)} runs failed. {told}")


def _start(job: Job, settings: dict[str, Any]) -> None:
    job.run.parent.mkdir(parents=True, exist_ok=True)
    job.result.parent.mkdir(parents=True, exist_ok=True)
    all_settings = {**settings, **job.cell.settings, "seed": job.seed}
    order = {"run": str(job.run), "result": str(job.result), "settings": all_settings}
    with open(job.log, "w") as log:
        command = [sys.executable, "-m", "millionway.studies.cell_process", json.dumps(order, default=str)]
        # Ctrl-C is for the study, which asks its runs to save and stop.
        job.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def _stop(running: list[Job]) -> None:
    for job in running:
        if job.process is not None and job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)  # it saves and stops
    for job in running:
        if job.process is not None:
            job.process.wait()


def short_name(data: str | None) -> str | None:
    """The end of a path, which says what it is without saying where it is."""
    return data and "/".join(Path(data).parts[-2:])


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no message"

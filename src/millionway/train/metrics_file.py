"""Append-only numbers: metrics.jsonl, one object a line, and the same as TensorBoard events."""

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from millionway.files import make_folder, open_append, write_whole
from millionway.reporting.metrics import line_of, read_metrics, warn_of_missing
from millionway.train.trackers import Follower


class Metrics:
    """Lines have a `kind` (step or evaluation) and the step they belong to."""

    def __init__(self, run: Path, resume_at: tuple[int, float] | None = None, follower: Follower | None = None) -> None:
        """resume_at: step and epoch where the run goes on; lines after it are dropped, they will be written again.

        Lines go by epochs, since the steps of an epoch are others when images have come or gone.
        """
        from millionway.train.event_file import EventFile

        self.path, self.num_lines, self.follower = run / "metrics.jsonl", 0, follower
        if resume_at is not None:
            self.num_lines = _drop_lines_after(run, self.path, resume_at[1])
        self.file = open_append(self.path)
        purge = None if resume_at is None else resume_at[0] + 1
        self.events = EventFile(make_folder(run / "tensorboard"), purge)

    def write(self, kind: str, step: int, epoch: float, **numbers: float) -> None:
        line = {"kind": kind, "step": step, "epoch": round(epoch, 6), **numbers}
        self.file.write(line_of(line))
        self.file.flush()
        self.num_lines += 1
        for name, value in numbers.items():
            self.events.add_scalar(f"{kind}/{name}", value, step)
        if self.follower is not None:
            self.follower.write(kind, step, numbers)

    def sync(self) -> None:
        """Everything written is on the disk."""
        self.events.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Everything was flushed line by line, so a full disk is not told a second time here."""
        for file in (self.file, self.events):
            with suppress(OSError):
                file.close()
        if self.follower is not None:
            self.follower.close()


def _drop_lines_after(run: Path, path: Path, epoch: float) -> int:
    """How many are left."""
    lines = read_metrics(path)
    warn_of_missing(run, lines)
    kept = [line for line in lines if line["epoch"] <= round(epoch, 6)]
    write_whole(path, "".join(map(line_of, kept)))
    return len(kept)


def peak_memory_bytes(device: torch.device) -> int:
    """The most that was in use so far: of a GPU's memory, or else of this process (its resident size)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak

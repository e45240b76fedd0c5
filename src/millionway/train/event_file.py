"""Numbers as TensorBoard reads them.

TensorBoard's own writer writes from a thread, where a full disk ends in a traceback that nobody can catch.
"""

import os
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from millionway.files import open_append


class EventFile:
    """A new one for each start of a run."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        """purge_step: what earlier files say of this step and later ones no longer counts."""
        # TensorBoard reads them in the order of their names.
        name = f"events.out.tfevents.{time.time_ns()}.millionway.{os.getpid()}"
        self.file = open_append(folder / name).detach()
        self.records = RecordWriter(self.file)
        self._write(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._write(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self._write(Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)])))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self.records.write(event.SerializeToString())

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()

"""What a person sees while a run goes on: messages, bars, and what Ctrl-C does."""

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from millionway.files import open_append

Item = TypeVar("Item")
IN_NOTEBOOK = "ipykernel" in sys.modules
"""there a bar would write line after line"""
console = Console(stderr=True, force_jupyter=False, force_terminal=False if IN_NOTEBOOK else None)
log = logging.getLogger("millionway")
TO_TERMINAL = "millionway to terminal"


def printable(text: str) -> str:
    r"""One line that does nothing to a terminal or a log: line breaks and control characters are spelled out (\n).

    Names of files and labels may hold any of them.
    """
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]


class _Lines(logging.Formatter):
    """Every message is one line."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _QuietFileHandler(logging.StreamHandler):
    """A log that cannot be written (the disk is full) must not hide what the run itself says about it."""

    def close(self) -> None:
        with suppress(OSError):
            self.stream.close()
        super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def be_quiet() -> None:
    """No messages and no bars from this process: another one speaks for it."""
    console.quiet = True


@contextmanager
def messages(log_file: Path | None = None, verbose: bool = False) -> Iterator[None]:
    """Messages go to the terminal, what is about internals only if it is verbose; all of them, with time, to a file."""
    handlers: list[logging.Handler] = []
    if not any(handler.name == TO_TERMINAL for handler in log.handlers):  # a verb that runs another one speaks once
        # Rich keeps messages and bars from writing over each other.
        rich = RichHandler(console=console, show_path=False, show_level=False, show_time=False)
        handlers.append(rich if console.is_terminal or console.quiet else logging.StreamHandler())
        handlers[0].name = TO_TERMINAL
        handlers[0].setLevel(logging.DEBUG if verbose else logging.INFO)
        handlers[0].setFormatter(_Lines())
    if log_file is not None:
        to_file = _QuietFileHandler(open_append(log_file))
        to_file.setFormatter(_Lines("%(asctime)s %(levelname)s %(message)s"))
        handlers.append(to_file)
    level = log.level
    log.setLevel(logging.DEBUG)
    for handler in handlers:
        log.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()
        log.setLevel(level)


def bar(*columns: str) -> Progress:
    """A progress bar with time left; `columns` are formats such as 'loss {task.fields[loss]:.3f}'."""
    texts = [TextColumn(column) for column in columns]
    parts = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *texts]
    return Progress(
        *parts, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )


def track(items: Iterable[Item], total: int, description: str) -> Iterator[Item]:
    """The items, with a bar that goes away at the end."""
    with bar() as progress:
        task, num, drawn = progress.add_task(description, total=total), 0, time.monotonic()
        for item in items:
            yield item
            num += 1
            if time.monotonic() - drawn > 0.1:  # drawing takes longer than some items
                progress.update(task, completed=num)
                drawn = time.monotonic()
        progress.update(task, completed=num)


class Interrupt:
    """Within it, the first Ctrl-C (or SIGTERM) only sets `asked`; the second one ends the program at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _on_signal(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        log.warning("stopping after this step; once more stops at once, without saving")

"""A run folder: who may use it, and what is left when a run never begins."""

import fcntl
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from millionway.files import TEMPORARY, check_folder, open_append, read_regular, remove, remove_leftovers, sync
from millionway.settings.pretrain import Pretrain
from millionway.settings.stored import CONFIG, STARTING, has_begun, write_start

log = logging.getLogger("millionway")

ENVIRONMENT, MANIFEST, LOG = "environment.json", "manifest.arrow", "train.log"
BEFORE_IT_BEGINS = {LOG, MANIFEST, ENVIRONMENT, STARTING}
LOG_LINE = rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ "
MAX_LOG_BYTES = 1 << 20
NUM_TRIES = 10


@contextmanager
def new_run_folder(run: Path, asked: Pretrain) -> Iterator[None]:
    """Make the folder and hold it. If the run never begins, leave nothing behind, so that it can be started again.

    A folder with nothing but a start that was killed is taken over.
    """
    try:
        run.parent.mkdir(parents=True, exist_ok=True)
        created = _mkdir(run)
        if not run.is_dir():
            raise ValueError(f"--out {run} is not a folder. Choose another name.")
        _check_free(run)
    except OSError as error:
        raise ValueError(f"--out {run} cannot be written: {error.strerror}") from None
    with sole_user(run):
        _check_free(run)  # somebody may have begun and ended in between
        try:
            write_start(run, asked)
            yield
        except BaseException:
            if not has_begun(run):
                _remove_start(run, created)
            raise


def _mkdir(run: Path) -> bool:
    """Whoever makes the folder is first; others see a start, and find it locked."""
    try:
        run.mkdir()
        with suppress(PermissionError):  # a folder that may be written to, and not listed
            sync(run.parent)
        return True
    except FileExistsError:
        return False


def _check_free(run: Path) -> None:
    """Refuse a folder in which there is anything but a start that was killed."""
    for name in os.listdir(run):
        match = TEMPORARY.fullmatch(name)
        known = (match["name"] if match else name) in {*BEFORE_IT_BEGINS, CONFIG} and name != CONFIG
        if not known or not _is_ours(run / name):
            raise ValueError(f"--out {run} exists already. Go on with it by --resume, or choose another folder.")


def _is_ours(path: Path) -> bool:
    """A log by that name may be anybody's."""
    if path.is_symlink() or not path.is_file():
        return False
    if path.name != LOG:
        return True
    content = read_regular(path, MAX_LOG_BYTES)
    return not content or re.match(LOG_LINE, content) is not None


def _remove_start(run: Path, created: bool) -> None:
    remove_leftovers(run)
    for name in BEFORE_IT_BEGINS:
        remove(run / name)
    if created:
        with suppress(OSError):  # not empty: somebody else is quick
            run.rmdir()


@contextmanager
def sole_user(run: Path) -> Iterator[None]:
    """Hold the run folder, so that no second process works on it; the system lets go of it when the process ends."""
    try:
        check_folder(run)
        file = _locked(run / LOG)
    except BlockingIOError:
        raise ValueError(f"--out {run} is in use: another process is training there") from None
    except OSError as error:
        raise ValueError(f"--out {run} cannot be written: {error.strerror}") from None
    with file:
        try:
            remove_leftovers(run)
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # processes that read images may still have it open


def _locked(path: Path) -> TextIO:
    """The file, held; made if it is not there."""
    for _ in range(NUM_TRIES):
        file = open_append(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise
        except OSError:
            log.warning("%s cannot be locked: do not start a second process on it", path.parent)
            return file
        # Whoever held it before may have removed it: then the lock is on nothing.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.lstat(path)):
                return file
        file.close()
    raise BlockingIOError

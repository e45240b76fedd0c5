"""Why a run ended before its last step, and how to go on: in words."""

import re
import shlex
from pathlib import Path

import torch

from millionway.console import first_line
from millionway.train import checkpoint


class RunStopped(RuntimeError):
    """The run ended before its last step. The message says why and how to go on."""


class Interrupted(RunStopped):
    """The user asked for it; all is saved."""


class LostContact(RunStopped):
    """Another rank stopped, hangs or cannot be reached."""


def resume_command(run: Path) -> str:
    return f"millionway pretrain --resume --out {shlex.quote(str(run))}"


def diverged(what: str, checkpoints: Path, step: int, steps_per_epoch: int, lr: float) -> str:
    good = next((each for each in checkpoint.complete(checkpoints) if not checkpoint.damage(each)), None)
    kept = f"The last good checkpoint is {good}" if good else "There is no checkpoint yet"
    return (
        f"{what} at step {step}, epoch {(step - 1) // steps_per_epoch + 1}. {kept}. "
        f"The learning rate was {lr:.3g}: start again with a lower --lr."
    )


def no_memory(error: Exception, rank: int, device: torch.device) -> str:
    return (
        f"rank {rank}: the memory of {device} is full ({first_line(error)}). Start again with "
        "--micro-batch (images encoded at a time), a smaller --batch-size or --image-size; `millionway plan` "
        "says what fits"
    )


def no_space(run: Path) -> str:
    left = checkpoint.complete(run / "checkpoints")
    newest = f"The newest complete checkpoint is {left[0]}" if left else "There is no checkpoint yet"
    return f"no space left in {run}. {newest}. Make space, then: {resume_command(run)}"


def failed_disk(error: Exception, run: Path) -> str:
    """A call to the system that failed, whichever library made it."""
    where = getattr(error, "filename", None) or f"in {run}"
    reason = getattr(error, "strerror", None) or first_line(error)
    return f"{where}: {reason}. If that is repaired: {resume_command(run)}"


def lost_contact(error: Exception, run: Path, rank: int, step: int | None, elsewhere: str) -> LostContact:
    """step: None before the first one. elsewhere: what is known of the other ranks."""
    reason = re.sub(r"^\[[^]]*\] *", "", first_line(error))  # without the line of the library's source
    when = "before the first step" if step is None else f"at step {step}"
    return LostContact(
        f"rank {rank} stopped {when} because of another one: {elsewhere or 'see their messages'} ({reason}). "
        f"Go on with: {resume_command(run)}"
    )

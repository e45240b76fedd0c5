"""A run that goes on beyond its last epoch: the learning rate rises again, and falls to 0 once more."""

import math
import re
from dataclasses import dataclass

from millionway.model.schedule import learning_rate
from millionway.settings.pretrain import Pretrain, with_settings

END = r"\d{1,9}@\d+(\.\d+)?(e-\d+)?"
EXTENDED = ("epochs", "lr", "extended_from")  # what is other in a run that goes on
MORE = 0.5  # of the epochs so far, where only the images have changed


@dataclass(frozen=True)
class Stretch:
    """Epochs over which the learning rate rises once and falls to 0."""

    first: int
    last: int
    """exclusive"""
    warmup: int
    peak: float

    def lr(self, step: int, steps_per_epoch: int) -> float:
        first = self.first * steps_per_epoch
        num_steps = (self.last - self.first) * steps_per_epoch
        return learning_rate(step - first, num_steps, self.warmup * steps_per_epoch, self.peak)


def stretches(config: Pretrain) -> list[Stretch]:
    training = config.training
    assert training.lr is not None and training.warmup_epochs is not None
    earlier = training.extended_from or ""
    if not re.fullmatch(rf"({END}(,{END})*)?", earlier):
        raise ValueError(f"--extended-from {earlier:.60}: these are earlier ends of the run, such as 100@0.06,200@0.03")
    ends = [part.split("@") for part in earlier.split(",") if part]
    found, first = [], 0
    for last, peak in [*((int(epochs), float(lr)) for epochs, lr in ends), (training.epochs, training.lr)]:
        warmup = training.warmup_epochs if first == 0 else min(training.warmup_epochs, max(1, (last - first) // 10))
        found.append(Stretch(first, last, warmup, peak))
        first = last
    return found


def extend(stored: Pretrain, epochs: int, lr: float | None = None) -> Pretrain:
    """The run's settings with more epochs. lr: the rate to rise to again; by default that of the run."""
    before = stored.training
    if epochs <= before.epochs:
        raise ValueError(
            f"--epochs {epochs}: the run has {before.epochs} already. --resume --epochs {2 * before.epochs} goes on "
            "for as many again."
        )
    assert before.lr is not None
    ends = f"{before.extended_from},{before.epochs}@{before.lr!r}".removeprefix("None,")
    return with_settings(stored, epochs=epochs, lr=lr or before.lr, extended_from=ends)


def extended_for_changes(stored: Pretrain) -> Pretrain:
    """Half as many epochs again: for a finished run whose images changed, if nobody says how many."""
    return extend(stored, stored.training.epochs + math.ceil(MORE * stored.training.epochs))


def in_words(config: Pretrain) -> str:
    last = stretches(config)[-1]
    warmup = f" within {last.warmup} epochs" if last.warmup > 1 else " within an epoch" if last.warmup else ""
    return (
        f"epochs {last.first + 1} to {last.last}: the learning rate rises to {last.peak:g} again{warmup}, then falls "
        "to 0 (--lr says another rate)"
    )

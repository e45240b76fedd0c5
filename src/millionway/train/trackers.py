"""--log-to: the numbers of metrics.jsonl also for Weights & Biases or MLflow, where their package is installed.

They follow a run and never end it: what fails there is said once.
"""

import hashlib
import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from millionway.console import first_line
from millionway.settings import pretrain as settings
from millionway.settings.pretrain import Pretrain

log = logging.getLogger("millionway")


class Tracker(Protocol):
    def write(self, numbers: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Wandb:
    """Settings of wandb's own (WANDB_PROJECT, WANDB_MODE=offline, ...) decide where its files go."""

    def __init__(self, run: Path, config: dict[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        known = hashlib.blake2b(str(run.resolve()).encode(), digest_size=8).hexdigest()
        self.run = wandb.init(project="millionway", name=run.name, id=known, resume="allow", config=config)

    def write(self, numbers: dict[str, float], step: int) -> None:
        self.run.log({**numbers, "step": step})  # its own count of steps cannot go back when a run does

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """In its own default place; MLFLOW_TRACKING_URI names another one, which may be a folder."""

    def __init__(self, run: Path, config: dict[str, Any]) -> None:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else a folder is refused
        self.client = MlflowClient()
        experiment = self.client.get_experiment_by_name("millionway")
        number = experiment.experiment_id if experiment else self.client.create_experiment("millionway")
        folder = str(run.resolve())
        before = [each for each in self.client.search_runs([number]) if each.data.tags.get("folder") == folder]
        if before:
            self.id = before[0].info.run_id
            self.client.update_run(self.id, "RUNNING")
        else:
            self.id = self.client.create_run(number, tags={"folder": folder}, run_name=run.name).info.run_id
        for name, value in config.items():
            try:
                self.client.log_param(self.id, name, value)
            except MlflowException:  # a parameter cannot change there, as --epochs does when a run is extended
                self.client.set_tag(self.id, name, value)

    def write(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.client.log_metric(self.id, name, value, step=step)

    def close(self) -> None:
        self.client.set_terminated(self.id)


KINDS: dict[str, Callable[[Path, dict[str, Any]], Tracker]] = {"wandb": Wandb, "mlflow": MLflow}


def check_tracker(config: Pretrain) -> None:
    """Refuse what is not installed, before any long work."""
    name = config.running.log_to
    if name is not None and importlib.util.find_spec(name) is None:
        raise ValueError(f"--log-to {name}: it is not installed; pip install 'millionway[{name}]'")


class Follower:
    """A tracker that is let go of when it fails."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name, self.tracker = name, None
        self._try(lambda: setattr(self, "tracker", make()))

    @staticmethod
    def of(run: Path, config: Pretrain) -> "Follower | None":
        name = config.running.log_to
        return None if name is None else Follower(name, lambda: KINDS[name](run, settings.flat(config)))

    def write(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        tracker = self.tracker
        if tracker is not None:
            self._try(lambda: tracker.write({f"{kind}/{name}": value for name, value in numbers.items()}, step))

    def close(self) -> None:
        if self.tracker is not None:
            self._try(self.tracker.close)

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # theirs are of all kinds, and none is a reason to stop training
            self.tracker = None
            log.warning("--log-to %s: %s; the run goes on without it", self.name, first_line(error))

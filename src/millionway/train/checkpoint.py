"""Save and resume. A checkpoint is written aside, synced and renamed; only complete ones are ever in view.

    checkpoints/step_00001000/
      model.safetensors      encoder, head and the optimizer's momentum
      classifier/            rows, their momentum, the hardest table
      state.json             counters, and size and checksum of every file
    checkpoints/last         names the newest complete one

While the contrastive prior is under way the folder is called prior_00000200, by the batches done.

Only safetensors and JSON are read, so a run folder from a stranger cannot run code.
"""

import errno
import json
import logging
import os
import shutil
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millionway.files import sync, write_whole
from millionway.machine import free_memory_bytes
from millionway.model.prior import PriorProgress
from millionway.parallel.collectives import all_gather_object, all_or_none, any_rank, on_first_rank
from millionway.parallel.group import Group
from millionway.parallel.launcher import local_size
from millionway.parallel.row_shards import load_shards, save_shards
from millionway.train.state import State

log = logging.getLogger("millionway")


def is_full_disk(error: BaseException) -> bool:
    """Whether a write failed for lack of space, whichever library says so."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return (isinstance(error, OSError) and error.errno in full) or "No space left" in str(error)


@dataclass
class _Snapshot:
    """What is written of a state: the tensors themselves, or a copy."""

    step: int
    prior: dict[str, Any] | None
    model: dict[str, Tensor]
    classifier: dict[str, Tensor]
    num_instances: int

    @staticmethod
    def of(state: State) -> "_Snapshot":
        model, rows = _model_tensors(state), _classifier_tensors(state)
        prior = None if state.prior is None else asdict(state.prior)
        return _Snapshot(state.step, prior, model, rows, state.classifier.num_instances)

    def copy(self) -> "_Snapshot":
        model, rows = ({k: v.to("cpu", copy=True) for k, v in t.items()} for t in (self.model, self.classifier))
        return replace(self, model=model, classifier=rows)

    @property
    def name(self) -> str:
        """Later ones sort after earlier ones."""
        return f"step_{self.step:08d}" if self.prior is None else f"prior_{self.prior['batches']:08d}"

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in [*self.model.values(), *self.classifier.values()])


class Saver:
    """Writes checkpoints beside the training, from a copy of the state, where there is memory for one."""

    def __init__(self, checkpoints: Path, fingerprint: str, keep: int, group: Group, timeout: float) -> None:
        self.where = checkpoints, fingerprint, keep
        self.group, self.group_beside = group, group.beside(timeout)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.under_way: Future | None = None
        self.said = False

    def save(self, state: State) -> None:
        """Begin to write. What went wrong with the last one is raised here, or by `wait`."""
        self.wait()
        snapshot = _Snapshot.of(state)
        # Twice, because the ranks of a machine ask at the same time, and the training needs some.
        too_large = 2 * local_size() * snapshot.num_bytes > free_memory_bytes()
        if any_rank(self.group, too_large):
            if not self.said:
                log.info("no memory for a copy of the state: training waits while a checkpoint is written")
            self.said = True
            _write(*self.where, snapshot, self.group)
        else:
            self.under_way = self.thread.submit(_write, *self.where, snapshot.copy(), self.group_beside)

    def wait(self) -> None:
        """Until the last one is complete."""
        under_way, self.under_way = self.under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Let the last one be finished, but not more."""
        self.thread.shutdown(wait=self.under_way is not None)


def save(checkpoints: Path, state: State, fingerprint: str, keep: int) -> Path:
    """Write the checkpoint of this step and remove all but the newest `keep`. If it fails, the others are untouched."""
    return _write(checkpoints, fingerprint, keep, _Snapshot.of(state), state.classifier.group)


def _write(checkpoints: Path, fingerprint: str, keep: int, snapshot: _Snapshot, group: Group) -> Path:
    """All ranks together: each writes its rows, the first one the rest."""
    final = checkpoints / snapshot.name
    aside = checkpoints / f".{final.name}.tmp"
    there = on_first_rank(group, lambda: final.exists() and _fingerprint(final) == fingerprint)
    if any_rank(group, bool(there)):
        return final
    try:
        on_first_rank(group, lambda: _begin(aside, snapshot))
        save_shards(snapshot.classifier, aside / "classifier", group, snapshot.num_instances)
        on_first_rank(group, lambda: _finish(aside, final, snapshot, fingerprint, keep))
    except BaseException:
        if group.is_first:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def _begin(aside: Path, snapshot: _Snapshot) -> None:
    for left_over in aside.parent.glob(".*.tmp"):  # of a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    aside.mkdir(parents=True)
    save_file(snapshot.model, aside / "model.safetensors")


def _finish(aside: Path, final: Path, snapshot: _Snapshot, fingerprint: str, keep: int) -> None:
    """Seal what all ranks have written and bring it into view."""
    checkpoints = final.parent
    files = {str(path.relative_to(aside)): _seal(path) for path in sorted(aside.rglob("*")) if path.is_file()}
    counters = {"version": 1, "step": snapshot.step, "prior": snapshot.prior, "fingerprint": fingerprint}
    counters["files"] = files
    write_whole(aside / "state.json", json.dumps(counters, indent=2))
    sync(aside / "classifier")
    shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step
    os.rename(aside, final)
    sync(checkpoints)
    write_whole(checkpoints / "last", final.name + "\n")
    # Later steps are damaged ones that the run was taken back behind.
    later = [each for each in complete(checkpoints) if each.name > final.name]
    for old in [*later, *complete(checkpoints)[len(later) + keep :]]:
        shutil.rmtree(old, ignore_errors=True)


def complete(checkpoints: Path) -> list[Path]:
    """Folders of checkpoints, newest first."""
    return sorted([*checkpoints.glob("prior_*"), *checkpoints.glob("step_*")], reverse=True)


def load_newest(checkpoints: Path, state: State, fingerprint: str) -> bool:
    """Fill the state from the newest checkpoint that is whole; say which were passed over. False if there is none."""
    group = state.classifier.group
    newest = on_first_rank(group, lambda: _newest(checkpoints, fingerprint))
    folder = all_gather_object(group, newest)[0]
    if folder is None:
        return False
    all_or_none(group, lambda: _load(folder, state))
    load_shards(_classifier_tensors(state), folder / "classifier", group, state.classifier.num_instances)
    log.info("going on from %s", folder)
    return True


def _newest(checkpoints: Path, fingerprint: str) -> Path | None:
    for folder in complete(checkpoints):
        problem = find_damage(folder)
        if problem:
            log.warning("checkpoint %s is damaged (%s); trying the one before", folder.name, problem)
            continue
        counters = json.loads((folder / "state.json").read_text())
        if counters["fingerprint"] != fingerprint:
            raise ValueError(
                f"{folder}: this checkpoint is of other images than {checkpoints.parent / 'manifest.arrow'}"
            )
        return folder
    return None


def newest_fingerprint(checkpoints: Path) -> str:
    """Of the images of the newest checkpoint that is whole, or ''."""
    return next(filter(None, map(_fingerprint, complete(checkpoints))), "")


def _fingerprint(folder: Path) -> str:
    """Of a checkpoint's images; '' if it is damaged."""
    return "" if find_damage(folder) else json.loads((folder / "state.json").read_text())["fingerprint"]


def find_damage(folder: Path) -> str:
    """What is wrong with a checkpoint, or ''."""
    try:
        files: dict[str, Any] = json.loads((folder / "state.json").read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"state.json: {error}"
    for name, seal in files.items():
        try:
            if _checksum(folder / name) != seal["crc32"]:
                return f"{name}: its content changed"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def all_finite(state: State) -> bool:
    """Whether the state is worth saving."""
    tensors = [*_model_tensors(state).values(), *_classifier_tensors(state).values()]
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
    return not any_rank(state.classifier.group, not finite)


def _load(folder: Path, state: State) -> None:
    """All but the rows."""
    tensors = load_file(folder / "model.safetensors")
    state.network.load_state_dict({k[8:]: v for k, v in tensors.items() if k.startswith("network.")}, strict=True)
    for name, parameter in state.network.named_parameters():
        if f"momentum.{name}" in tensors:
            buffer = torch.empty_like(parameter).copy_(tensors[f"momentum.{name}"])
            state.optimizer.state[parameter]["momentum_buffer"] = buffer
    counters = json.loads((folder / "state.json").read_text())
    state.step = state.classifier.step = counters["step"]
    state.prior = None if counters.get("prior") is None else PriorProgress(**counters["prior"])


def _model_tensors(state: State) -> dict[str, Tensor]:
    tensors = {f"network.{name}": tensor for name, tensor in state.network.state_dict().items()}
    for name, parameter in state.network.named_parameters():
        if "momentum_buffer" in state.optimizer.state.get(parameter, {}):
            tensors[f"momentum.{name}"] = state.optimizer.state[parameter]["momentum_buffer"]
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _classifier_tensors(state: State) -> dict[str, Tensor]:
    tensors = {"rows": state.classifier.weight, "momentum": state.classifier.momentum}
    return tensors if state.hardest is None else {**tensors, "hardest": state.hardest}


def _seal(path: Path) -> dict[str, int]:
    """Sync a file to the disk and describe it."""
    sync(path)
    return {"bytes": path.stat().st_size, "crc32": _checksum(path)}


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value

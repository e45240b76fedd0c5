"""Save and resume. A checkpoint is written aside, synced and renamed; only complete ones are ever in view.

    checkpoints/step_00001000/
      model.safetensors      encoder, head and the optimizer's momentum
      classifier/            rows, their momentum, the hardest table
      state.json             counters, and size and checksum of every file
    checkpoints/last         names the newest complete one

Only safetensors and JSON are read, so a run folder from a stranger cannot run code.
"""

import errno
import json
import logging
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millionway.files import sync, write_whole
from millionway.model.classifier import InstanceClassifier
from millionway.parallel.shards import load_shards, save_shards
from millionway.train.step import Network

log = logging.getLogger("millionway")


def is_full_disk(error: BaseException) -> bool:
    """Whether a write failed for lack of space, whichever library says so."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return (isinstance(error, OSError) and error.errno in full) or "No space left" in str(error)


@dataclass
class State:
    """Everything that a run changes."""

    network: Network
    optimizer: torch.optim.SGD
    classifier: InstanceClassifier
    hardest: Tensor | None
    step: int
    """steps done"""


def save(checkpoints: Path, state: State, fingerprint: str, keep: int) -> Path:
    """Write the checkpoint of this step and remove all but the newest `keep`. If it fails, the others are untouched."""
    final = checkpoints / f"step_{state.step:08d}"
    aside = checkpoints / f".{final.name}.tmp"
    if final.exists() and not find_damage(final):
        return final
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save_file(_model_tensors(state), aside / "model.safetensors")
        save_shards(_classifier_tensors(state), aside / "classifier")
        files = {str(path.relative_to(aside)): _seal(path) for path in sorted(aside.rglob("*")) if path.is_file()}
        counters = {"version": 1, "step": state.step, "fingerprint": fingerprint, "files": files}
        write_whole(aside / "state.json", json.dumps(counters, indent=2))
        sync(aside / "classifier")
        shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step
        os.rename(aside, final)
        sync(checkpoints)
        write_whole(checkpoints / "last", final.name + "\n")
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    # Later steps are damaged ones that the run was taken back behind.
    later = [each for each in complete(checkpoints) if each.name > final.name]
    for old in [*later, *complete(checkpoints)[len(later) + keep :]]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def complete(checkpoints: Path) -> list[Path]:
    """Folders of checkpoints, newest first."""
    return sorted(checkpoints.glob("step_*"), reverse=True)


def load_newest(checkpoints: Path, state: State, fingerprint: str) -> bool:
    """Fill the state from the newest checkpoint that is whole; say which were passed over. False if there is none."""
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
        _load(folder, state, counters)
        log.info("going on from %s", folder)
        return True
    return False


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
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def _load(folder: Path, state: State, counters: dict[str, Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    state.network.load_state_dict({k[8:]: v for k, v in tensors.items() if k.startswith("network.")}, strict=True)
    for name, parameter in state.network.named_parameters():
        if f"momentum.{name}" in tensors:
            buffer = torch.empty_like(parameter).copy_(tensors[f"momentum.{name}"])
            state.optimizer.state[parameter]["momentum_buffer"] = buffer
    load_shards(_classifier_tensors(state), folder / "classifier")
    state.step = state.classifier.step = counters["step"]


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

"""Save and resume. A checkpoint is written aside, synced and renamed; only complete ones are ever in view.

    checkpoints/step_00001000/
      model.safetensors      encoder, head and the optimizer's momentum
      classifier/            rows, their momentum, the hardest table
      state.json             counters
      manifest.json          size and checksum of every file
    checkpoints/last         names the newest complete one
    checkpoints/seals        the checksum of each one's manifest.json

While the contrastive prior is under way the folder is called prior_00000200, by the batches done.

Only safetensors and JSON are read. A checkpoint is read when all its checksums are right, else the one before.
"""

import errno
import hashlib
import logging
import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from millionway.files import (
    BadFile,
    make_folder,
    read_regular,
    remove,
    remove_leftovers,
    sync,
    temporary_name,
    write_whole,
)
from millionway.machine import free_memory_bytes, num_local_ranks
from millionway.model.prior import PriorProgress
from millionway.parallel.collectives import all_gather_object, all_or_none, any_rank, on_first_rank
from millionway.parallel.group import Group
from millionway.parallel.row_shards import load_shards, save_shards
from millionway.seals import MANIFEST, check_fields, find_damage, read_json, seal_folder, write_json
from millionway.tensor_file import write_tensors
from millionway.train.state import State

log = logging.getLogger("millionway")

NAME = r"(?:step|prior)_\d{8,}"
SEALS_BYTES = 1 << 20


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
    num_lines: int = 0
    """of metrics.jsonl, so that lost ones are missed"""

    @staticmethod
    def of(state: State, num_lines: int = 0) -> "_Snapshot":
        model, rows = state.model_tensors(), state.classifier_tensors()
        prior = None if state.prior is None else asdict(state.prior)
        return _Snapshot(state.step, prior, model, rows, state.classifier.num_instances, num_lines)

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

    def save(self, state: State, num_lines: int = 0) -> None:
        """Begin to write. What went wrong with the last one is raised here, or by `wait`."""
        self.wait()
        snapshot = _Snapshot.of(state, num_lines)
        # Twice, because the ranks of a machine ask at the same time, and the training needs some.
        too_large = 2 * num_local_ranks() * snapshot.num_bytes > free_memory_bytes()
        if any_rank(self.group, too_large or state.classifier.store is not None):
            if not self.said:
                log.debug("no copy of the rows in memory: training waits while a checkpoint is written")
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
    there = on_first_rank(group, lambda: final.exists() and _fingerprint(final) == fingerprint)
    if any_rank(group, bool(there)):
        return final
    aside = checkpoints / all_gather_object(group, temporary_name(final.name))[0]
    try:
        on_first_rank(group, lambda: _begin(aside, snapshot))
        save_shards(snapshot.classifier, aside / "classifier", group, snapshot.num_instances)
        on_first_rank(group, lambda: _finish(aside, final, snapshot, fingerprint, keep))
    except BaseException:
        if group.is_first:
            remove(aside)
        raise
    return final


def _begin(aside: Path, snapshot: _Snapshot) -> None:
    remove_leftovers(make_folder(aside.parent))
    aside.mkdir()
    write_tensors(aside / "model.safetensors", snapshot.model)


def _finish(aside: Path, final: Path, snapshot: _Snapshot, fingerprint: str, keep: int) -> None:
    """Seal what all ranks have written and bring it into view."""
    checkpoints = final.parent
    counters = {"version": 2, "step": snapshot.step, "prior": snapshot.prior, "fingerprint": fingerprint}
    write_json(aside / "state.json", {**counters, "num_lines": snapshot.num_lines})
    seals = {**_seals(checkpoints), final.name: seal_folder(aside)}
    if final.exists():  # a damaged one of the same step, or one of other images
        _write_last(checkpoints, {name: seal for name, seal in seals.items() if name != final.name})
        _discard(final)
    os.rename(aside, final)
    sync(checkpoints)
    # Later steps are damaged ones that the run was taken back behind.
    later = [each for each in complete(checkpoints) if each.name > final.name]
    old = [*later, *complete(checkpoints)[len(later) + keep :]]
    kept = {each.name for each in complete(checkpoints)} - {each.name for each in old}
    _write_last(checkpoints, {name: seal for name, seal in seals.items() if name in kept})
    for each in old:
        _discard(each)


def _discard(folder: Path) -> None:
    """It is out of view at once, whole as it was."""
    aside = folder.with_name(temporary_name(folder.name))
    os.rename(folder, aside)
    remove(aside)


def complete(checkpoints: Path) -> list[Path]:
    """Folders of checkpoints, newest first."""
    found = [path for path in checkpoints.iterdir() if re.fullmatch(NAME, path.name)] if checkpoints.is_dir() else []
    return sorted((path for path in found if path.is_dir() and not path.is_symlink()), reverse=True)


def _write_last(checkpoints: Path, seals: dict[str, str]) -> None:
    """`seals` first: it may know of more than `last` names, never of less."""
    names = sorted(seals, reverse=True)
    text = "".join(f"{name} {seals[name]}\n" for name in names)
    write_whole(checkpoints / "seals", f"{text}seal {hashlib.sha256(text.encode()).hexdigest()}\n")
    write_whole(checkpoints / "last", "".join(f"{name}\n" for name in names[:1]))


def _mend_last(newest: Path) -> None:
    """It is read by people and other programs alone, so damage to it would else stay."""
    last, wanted = newest.parent / "last", f"{newest.name}\n"
    with suppress(OSError, ValueError):  # not there, or not a file of ours
        if read_regular(last, SEALS_BYTES) == wanted.encode():
            return
    write_whole(last, wanted)


def _seals(checkpoints: Path) -> dict[str, str]:
    """{name: checksum of its manifest.json}. Without the file, each checkpoint's own seals must do."""
    if not (checkpoints / "seals").exists():
        return {}
    try:
        text, found, seal = read_regular(checkpoints / "seals", SEALS_BYTES).decode().rpartition("seal ")
        if not found or seal.strip() != hashlib.sha256(text.encode()).hexdigest():
            raise BadFile(checkpoints / "seals", "its own seal is broken")
    except ValueError as error:
        log.warning("%s; the checkpoints' own seals are looked at", error)
        return {}
    return dict(re.findall(rf"^({NAME}) ([0-9a-f]{{64}})$", text, re.MULTILINE))


def load_newest(checkpoints: Path, state: State, fingerprint: str) -> bool:
    """Fill the state from the newest checkpoint that is whole; say which were passed over. False if there is none."""
    group = state.classifier.group
    newest = on_first_rank(group, lambda: _newest(checkpoints, fingerprint))
    folder = all_gather_object(group, newest)[0]
    if folder is None:
        return False
    on_first_rank(group, lambda: _mend_last(folder))
    all_or_none(group, lambda: _load(folder, state))
    try:
        load_shards(state.classifier_tensors(), folder / "classifier", group, state.classifier.num_instances)
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _does_not_fit(folder, error) from None
    table = state.hardest
    if table is not None and not bool(((table >= 0) & (table < state.classifier.num_instances)).all()):
        raise BadFile(folder / "classifier", "its table of hardest classes names classes that are not there")
    log.info("going on from %s", folder)
    return True


def _does_not_fit(path: Path, error: Exception) -> BadFile:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return BadFile(path, f"it does not fit this run ({reason})", "Was it copied from another one?")


def _newest(checkpoints: Path, fingerprint: str) -> Path | None:
    for folder in complete(checkpoints):
        problem = damage(folder)
        if problem and _is_of_older_version(folder):
            raise BadFile(
                folder,
                "an older version wrote it, without seals",
                f"Go on with that version, or begin a new run with --init-from {checkpoints.parent}",
            )
        if problem:
            log.warning("checkpoint %s is damaged (%s); trying the one before", folder.name, problem)
            continue
        if _fingerprint(folder) != fingerprint:
            raise ValueError(
                f"{folder}: this checkpoint is of other images than {checkpoints.parent / 'manifest.arrow'}"
            )
        return folder
    return None


def _is_of_older_version(folder: Path) -> bool:
    try:
        return not (folder / MANIFEST).exists() and read_json(folder / "state.json").get("version") == 1
    except BadFile:
        return False


def newest_fingerprint(checkpoints: Path) -> str:
    """Of the images of the newest checkpoint that is whole, or ''."""
    return next(filter(None, map(_fingerprint, complete(checkpoints))), "")


def _fingerprint(folder: Path) -> str:
    """Of a checkpoint's images; '' if it is damaged."""
    return "" if damage(folder) else _counters(folder)["fingerprint"]


def damage(folder: Path) -> str:
    """What is wrong with a checkpoint, or ''."""
    seal = _seals(folder.parent).get(folder.name)
    try:
        return find_damage(folder, seal) or ("" if _counters(folder) else "state.json: empty")
    except BadFile as error:
        return str(error)


def _counters(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    counters = read_json(path)
    check_fields(path, counters, step=int, fingerprint=str, prior=(dict, type(None)))
    prior = counters["prior"]
    if prior is not None:
        check_fields(path, prior, batches=int, rows=int, lengths=(int, float), untrained=dict)
        check_fields(path, prior["untrained"], **dict.fromkeys(prior["untrained"], (int, float)))
    number = prior["batches"] if prior is not None else counters["step"]
    if folder.name != f"{'step' if prior is None else 'prior'}_{number:08d}":
        raise BadFile(path, f"it is of number {number}, and the folder is called {folder.name}")
    return counters


def _load(folder: Path, state: State) -> None:
    """All but the rows."""
    path, counters = folder / "model.safetensors", _counters(folder)
    try:
        tensors = load_file(path)
        state.network.load_state_dict({k[8:]: v for k, v in tensors.items() if k.startswith("network.")}, strict=True)
        for name, parameter in state.network.named_parameters():
            if f"momentum.{name}" in tensors:
                buffer = torch.empty_like(parameter).copy_(tensors[f"momentum.{name}"])
                state.optimizer.state[parameter]["momentum_buffer"] = buffer
    except (RuntimeError, SafetensorError) as error:
        raise _does_not_fit(path, error) from None
    state.step = state.classifier.step = counters["step"]
    known = {field.name for field in fields(PriorProgress)}
    prior = counters["prior"]
    state.prior = prior and PriorProgress(**{name: value for name, value in prior.items() if name in known})


def newest_rows(checkpoints: Path, fingerprint: str) -> tuple[Tensor, Path] | None:
    """(rows [instances, dim], the checkpoint they are from): of the newest one that is whole, or None."""
    folder = _newest(checkpoints, fingerprint)
    if folder is None:
        return None
    try:
        parts = []
        for path in sorted((folder / "classifier").glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                parts.append((file.get_slice("rows").get_shape(), file.get_slice("rows")[:0].dtype))
        rows = torch.empty(sum(shape[0] for shape, _ in parts), parts[0][0][1], dtype=parts[0][1])
        load_shards({"rows": rows}, folder / "classifier", Group(), len(rows))
    except (ValueError, KeyError, TypeError, IndexError, SafetensorError) as error:
        raise _does_not_fit(folder, error) from None
    return rows, folder

"""Features of a few images at each evaluation of a run, so that one can watch them come apart."""

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from millionway.files import BadFile, make_folder, replacing
from millionway.model.encoder_file import tensors_hash
from millionway.seals import opened, sealed
from millionway.tensor_file import write_tensors

log = logging.getLogger("millionway")

MAX_IMAGES = 2000
HEADER = "millionway_snapshot"
DAMAGED = "Remove it: the page has one map less"
NAME = re.compile(r"epoch_(\d{1,9})\.safetensors")


@dataclass(frozen=True)
class Snapshot:
    ids: Tensor  # [images] instance ids
    features: Tensor  # [images, features]


def write_snapshot(run: Path, epoch: int, snapshot: Snapshot) -> None:
    folder = make_folder(run / "snapshots")
    with replacing(folder / f"epoch_{epoch:05d}.safetensors") as aside:
        tensors = {"instance_ids": snapshot.ids.contiguous(), "features": snapshot.features.half().contiguous()}
        about = sealed({"epoch": epoch, "sha256": tensors_hash(tensors)})
        write_tensors(aside, tensors, {HEADER: json.dumps(about)})


def snapshot_epochs(run: Path) -> list[int]:
    """Ascending."""
    found = (NAME.fullmatch(path.name) for path in (run / "snapshots").glob("epoch_*.safetensors"))
    return sorted(int(match[1]) for match in found if match)


def read_snapshot(run: Path, epoch: int) -> Snapshot:
    path = run / "snapshots" / f"epoch_{epoch:05d}.safetensors"
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
        stored = load_file(path)
        snapshot = Snapshot(stored["instance_ids"], stored["features"])
    except (OSError, SafetensorError, KeyError) as error:
        raise BadFile(path, f"not a file of features ({error})", DAMAGED) from None
    if HEADER not in header:
        log.warning("%s has no seal, so nobody can tell whether it was changed or damaged", path)
    elif opened(path, header[HEADER], DAMAGED) != {"epoch": epoch, "sha256": tensors_hash(stored)}:
        raise BadFile(path, "it is not as it was written: its seal is broken", DAMAGED)
    if snapshot.ids.shape != snapshot.features.shape[:1] or not bool(torch.isfinite(snapshot.features).all()):
        raise BadFile(path, "not a finite feature for every image", DAMAGED)
    return snapshot

"""Features of a few images at each evaluation of a run, so that one can watch them come apart."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from millionway.files import make_folder, replacing

MAX_IMAGES = 2000
NAME = re.compile(r"epoch_(\d{1,9})\.safetensors")


@dataclass(frozen=True)
class Snapshot:
    ids: Tensor  # [images] instance ids
    features: Tensor  # [images, features]


def write_snapshot(run: Path, epoch: int, snapshot: Snapshot) -> None:
    folder = make_folder(run / "snapshots")
    with replacing(folder / f"epoch_{epoch:05d}.safetensors") as aside:
        save_file({"instance_ids": snapshot.ids.contiguous(), "features": snapshot.features.half().contiguous()}, aside)


def snapshot_epochs(run: Path) -> list[int]:
    """Ascending."""
    found = (NAME.fullmatch(path.name) for path in (run / "snapshots").glob("epoch_*.safetensors"))
    return sorted(int(match[1]) for match in found if match)


def read_snapshot(run: Path, epoch: int) -> Snapshot:
    path = run / "snapshots" / f"epoch_{epoch:05d}.safetensors"
    try:
        stored = load_file(path)
        snapshot = Snapshot(stored["instance_ids"], stored["features"])
    except (OSError, SafetensorError, KeyError) as error:
        raise ValueError(f"{path}: not a file of features ({error})") from None
    if snapshot.ids.shape != snapshot.features.shape[:1] or not bool(torch.isfinite(snapshot.features).all()):
        raise ValueError(f"{path}: not a finite feature for every image")
    return snapshot

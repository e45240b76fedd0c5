"""What took long is kept on the disk, by what it is made of; the least recently used goes when there is too much."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from millionway.evaluation.feature_cache import MAX_BYTES, default_folder
from millionway.files import replacing
from millionway.tensor_file import write_tensors


@dataclass(frozen=True)
class Kept:
    """Of one collection: files named after what they are made of."""

    folder: Path

    @staticmethod
    def of(fingerprint: str) -> "Kept":
        """fingerprint: of the images."""
        folder = default_folder() / "collections" / fingerprint
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        _forget_oldest(folder)
        return Kept(folder)

    def tensors(self, name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        path = self.folder / f"{name}.safetensors"
        try:
            return load_file(path)
        except (OSError, SafetensorError):
            made = compute()
        with replacing(path) as aside:
            write_tensors(aside, made)
        return made


def _forget_oldest(ours: Path) -> None:
    folders = sorted((each for each in ours.parent.iterdir() if each.is_dir()), key=lambda each: -each.stat().st_mtime)
    total = 0
    for folder in folders:
        total += sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if total > MAX_BYTES and folder != ours:
            shutil.rmtree(folder, ignore_errors=True)

"""Features on the disk, by what they are made of: encoder weights, images, size. A changed encoder has other ones."""

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from millionway.files import replacing
from millionway.tensor_file import write_tensors

log = logging.getLogger("millionway")

MAX_BYTES = 20 << 30
VERSION = "2"


def default_folder() -> Path:
    return Path(os.environ.get("MILLIONWAY_FEATURES", "~/.cache/millionway/features")).expanduser()


@dataclass(frozen=True)
class FeatureCache:
    folder: Path

    def get(
        self,
        encoder_hash: str,
        fingerprint: str,
        image_size: int,
        instance_ids: Tensor,
        compute: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """(features, instance ids), as `compute` gives them; it is asked for those that are not there.

        An image that it leaves out is asked for again the next time.
        """
        path = self.folder / f"{_name(encoder_hash, fingerprint, image_size)}.safetensors"
        features, ids = self._load(path)
        missing = instance_ids[~torch.isin(instance_ids, ids)]
        if len(missing):
            new, new_ids = compute(missing)
            features, ids = torch.cat([features, new]), torch.cat([ids, new_ids])
            self._save(path, features, ids)
        place_of = torch.full((int(torch.cat([ids, instance_ids]).max()) + 1,), -1)
        place_of[ids] = torch.arange(len(ids))
        places = place_of[instance_ids]
        return features[places[places >= 0]], instance_ids[places >= 0]

    def _load(self, path: Path) -> tuple[Tensor, Tensor]:
        try:
            stored = load_file(path)
            os.utime(path)  # the least recently used goes first
            return stored["features"], stored["instance_ids"]
        except (OSError, SafetensorError, KeyError):
            return torch.empty(0), torch.empty(0, dtype=torch.int64)  # not there, or not whole

    def _save(self, path: Path, features: Tensor, ids: Tensor) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as aside:
                write_tensors(aside, {"features": features, "instance_ids": ids})
            self._forget_oldest()
        except OSError as error:
            log.warning("features are not kept in %s: %s", self.folder, error.strerror)

    def _forget_oldest(self) -> None:
        files = sorted(self.folder.glob("*.safetensors"), key=lambda path: -path.stat().st_mtime)
        total = 0
        for path in files:
            total += path.stat().st_size
            if total > MAX_BYTES:
                path.unlink(missing_ok=True)


def _name(encoder_hash: str, fingerprint: str, image_size: int) -> str:
    text = "\0".join((VERSION, encoder_hash, fingerprint, str(image_size)))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

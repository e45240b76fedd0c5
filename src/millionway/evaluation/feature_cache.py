"""Features on the disk, by what they are made of: encoder weights, images, size. A changed encoder has other ones."""

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from millionway.evaluation.features import Labelled
from millionway.files import replacing

log = logging.getLogger("millionway")

MAX_BYTES = 20 << 30
VERSION = "1"


def default_folder() -> Path:
    return Path(os.environ.get("MILLIONWAY_FEATURES", "~/.cache/millionway/features")).expanduser()


@dataclass(frozen=True)
class FeatureCache:
    folder: Path

    def get(
        self, encoder_hash: str, part: Labelled, image_size: int, compute: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """(features, labels), computed if they are not there."""
        path = self.folder / f"{_name(encoder_hash, part, image_size)}.safetensors"
        try:
            stored = load_file(path)
            os.utime(path)  # the least recently used goes first
            return stored["features"], stored["labels"]
        except (OSError, SafetensorError, KeyError):
            pass  # not there, or not whole
        features, labels = compute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as aside:
                save_file({"features": features.contiguous(), "labels": labels.contiguous()}, aside)
            self._forget_oldest()
        except OSError as error:
            log.warning("features are not kept in %s: %s", self.folder, error.strerror)
        return features, labels

    def _forget_oldest(self) -> None:
        files = sorted(self.folder.glob("*.safetensors"), key=lambda path: -path.stat().st_mtime)
        total = 0
        for path in files:
            total += path.stat().st_size
            if total > MAX_BYTES:
                path.unlink(missing_ok=True)


def _name(encoder_hash: str, part: Labelled, image_size: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in (VERSION, encoder_hash, part.dataset.manifest.fingerprint, str(image_size)):
        digest.update(text.encode() + b"\0")
    for tensor in (part.instance_ids, part.labels):
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()

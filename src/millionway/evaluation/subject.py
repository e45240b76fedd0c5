"""The encoder that is scored: a run's, a weight file's, a library's, or an untrained one."""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from millionway.model.encoder import Encoder, EncoderSpec, build_encoder, full_name
from millionway.model.encoder_file import START, load_encoder
from millionway.model.foreign_weights import first_tensors, library_weights, match, read_tensors, stem_of, take
from millionway.settings.pretrain import IMAGENET_MEAN, IMAGENET_STD
from millionway.settings.resolve import choose_stem
from millionway.settings.stored import run_settings

log = logging.getLogger("millionway")


@dataclass(frozen=True)
class Subject:
    """An encoder with what identifies it."""

    name: str
    encoder: Encoder
    encoder_hash: str
    run: Path | None = None
    """the run folder, if it is a run's"""
    seed: int | None = None
    """that of an untrained encoder"""
    beside: Path | None = None
    """the run that it is compared with"""

    def at(self, seed: int) -> "Subject":
        """This encoder; another untrained one for each seed."""
        return self if self.seed in (None, seed) else _untrained(self.encoder.spec, seed, self.beside)

    def others(self, seed: int) -> "dict[str, Subject]":
        """What its numbers are compared with: `untrained`, and `start`, the weights that its run began with."""
        if self.seed is not None:
            return {}
        others = {"untrained": _untrained(self.encoder.spec, seed, self.run)}
        if self.run is None or not (self.run / "config.json").is_file():
            return others
        config, kept = run_settings(self.run), self.run / START
        if config.init_from is not None:
            weights = kept if kept.is_file() else config.init_from
            try:
                others["start"] = _start(self.encoder.spec, weights, config.training.seed, self.run)
            except ValueError as error:
                log.warning("the weights that the run began with are not scored: %s", error)
        return others

    @property
    def description(self) -> dict[str, Any]:
        """For the files of results."""
        spec = self.encoder.spec
        about = {"encoder": self.name, "encoder_hash": self.encoder_hash, "image_size": spec.image_size}
        return {**about, "mean": spec.mean, "std": spec.std}


def open_subject(run: Path | None, name: str | None, weights: str | None, image_size: int | None, seed: int) -> Subject:
    """run: a run folder or an encoder.safetensors. Else `name`, torchvision/NAME or timm/NAME, and its weights.

    weights: a file, `random` (the default), or `supervised`, which is what the library itself offers for download.
    """
    if (run is None) == (name is None):
        raise ValueError("give either --run, a run folder, or --encoder, such as torchvision/resnet50")
    if run is not None:
        if weights is not None:
            raise ValueError("--weights belongs to --encoder; a run has its own")
        encoder = load_encoder(run)
        encoder.spec = replace(encoder.spec, image_size=image_size or encoder.spec.image_size)
        return Subject(str(run), encoder, state_hash(encoder), run if run.is_dir() else None)
    assert name is not None
    name = full_name(name)
    size, mean, std = input_of(name)
    size = image_size or size
    if weights in (None, "random"):
        return _untrained(EncoderSpec(name, choose_stem(name, "auto", size), size, mean, std), seed)
    if weights == "supervised":
        tensors = library_weights(name, "--weights supervised", "Give a file with --weights.")
    else:
        tensors = read_tensors(Path(weights), "--weights")
    stem = stem_of(tensors, name) or choose_stem(name, "auto", size)
    encoder = build_encoder(EncoderSpec(name, stem, size, mean, std), seed)
    matched = match(encoder, tensors)
    if matched.missing or matched.wrong:
        raise ValueError(matched.differences(weights))
    take(encoder, matched)
    encoder.eval()
    return Subject(f"{name}, {weights}", encoder, state_hash(encoder))


def _untrained(spec: EncoderSpec, seed: int, beside: Path | None = None) -> Subject:
    encoder = build_encoder(spec, seed).eval()
    return Subject(f"{spec.name}, random", encoder, state_hash(encoder), seed=seed, beside=beside)


def _start(spec: EncoderSpec, weights: Path, seed: int, run: Path | None) -> Subject:
    """What a run's own seed adds to the weights is there too."""
    encoder = build_encoder(spec, seed)
    take(encoder, match(encoder, first_tensors(weights, spec.name, "--init-from")))
    encoder.eval()
    return Subject(f"{spec.name}, {weights}", encoder, state_hash(encoder), beside=run)


def input_of(name: str) -> tuple[int, tuple[float, float, float], tuple[float, float, float]]:
    """(image size, mean, std) that a library's weights were trained with."""
    if name.startswith("timm/"):
        import timm

        known = timm.get_pretrained_cfg(name.removeprefix("timm/"))
        if known is not None:
            return known.input_size[-1], known.mean, known.std  # pyright: ignore[reportReturnType]
    return 224, IMAGENET_MEAN, IMAGENET_STD


def state_hash(encoder: Encoder) -> str:
    """Of the weights as they are in memory, and of what else decides a feature."""
    digest = hashlib.blake2b(json.dumps(asdict(encoder.spec)).encode(), digest_size=16)
    for name, tensor in sorted(encoder.backbone.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()

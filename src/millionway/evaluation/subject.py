"""The encoder that is scored: a run's, a weight file's, a library's, or an untrained one."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from millionway.model.encoder import Encoder, EncoderSpec, build_encoder, full_name
from millionway.model.encoder_file import load_encoder
from millionway.settings.pretrain import IMAGENET_MEAN, IMAGENET_STD
from millionway.settings.resolve import PLAIN_RESNETS, choose_stem

WRAPPERS = ("state_dict", "model", "model_state", "teacher", "student")
PREFIXES = ("", "module.", "backbone.", "encoder.", "encoder_q.", "model.", "base_encoder.", "resnet.", "trunk.")


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

    def at(self, seed: int) -> "Subject":
        """This encoder; another untrained one for each seed."""
        return self if self.seed in (None, seed) else _untrained(self.encoder.spec, seed)

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
    size, mean, std = _input_of(name)
    size = image_size or size
    if weights in (None, "random"):
        return _untrained(EncoderSpec(name, choose_stem(name, "auto", size), size, mean, std), seed)
    tensors = _supervised_weights(name) if weights == "supervised" else read_weights(Path(weights))
    encoder = build_encoder(EncoderSpec(name, _stem_of(tensors, name, size), size, mean, std), seed)
    _load(encoder, tensors, weights)
    encoder.eval()
    return Subject(f"{name}, {weights}", encoder, state_hash(encoder))


def _untrained(spec: EncoderSpec, seed: int) -> Subject:
    encoder = build_encoder(spec, seed).eval()
    return Subject(f"{spec.name}, random", encoder, state_hash(encoder), seed=seed)


def _input_of(name: str) -> tuple[int, tuple[float, float, float], tuple[float, float, float]]:
    """(image size, mean, std) that a library's weights were trained with."""
    if name.startswith("timm/"):
        import timm

        known = timm.get_pretrained_cfg(name.removeprefix("timm/"))
        if known is not None:
            return known.input_size[-1], known.mean, known.std  # pyright: ignore[reportReturnType]
    return 224, IMAGENET_MEAN, IMAGENET_STD


def _stem_of(tensors: dict[str, Tensor], name: str, image_size: int) -> Literal["standard", "small"]:
    """A ResNet's weights say which they have: its first convolution is 7 x 7 or 3 x 3."""
    firsts = [t for key, t in tensors.items() if key.endswith("conv1.weight") and t.ndim == 4 and t.shape[1] == 3]
    if len(firsts) != 1 or not re.fullmatch(PLAIN_RESNETS, name):
        return choose_stem(name, "auto", image_size)
    return "standard" if firsts[0].shape[-1] == 7 else "small"


def state_hash(encoder: Encoder) -> str:
    """Of the weights as they are in memory, and of what else decides a feature."""
    digest = hashlib.blake2b(json.dumps(asdict(encoder.spec)).encode(), digest_size=16)
    for name, tensor in sorted(encoder.backbone.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors or torch file, out of what they are wrapped in. Nothing else is unpickled."""
    if not path.is_file():
        raise ValueError(f"--weights {path}: no such file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise ValueError(f"--weights {path}: not a safetensors file ({error})") from None
    except Exception as error:  # torch raises anything here, and a foreign class is refused by name
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"--weights {path}: not a file of tensors alone ({reason})") from None
    while isinstance(content, dict):
        inner = next((content[key] for key in WRAPPERS if isinstance(content.get(key), dict)), None)
        if inner is None:
            break
        content = inner
    tensors = {k: v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, dict) else {}
    if not tensors:
        raise ValueError(f"--weights {path}: there are no named tensors in it")
    return tensors


def _supervised_weights(name: str) -> dict[str, Tensor]:
    library, _, short = name.partition("/")
    try:
        if library == "torchvision":
            import torchvision

            return torchvision.models.get_model(short, weights="DEFAULT").state_dict()
        import timm

        return timm.create_model(short, pretrained=True).state_dict()
    except Exception as error:  # no network, or no such weights: the remedy is the same
        raise ValueError(
            f"--weights supervised: {name}'s own could not be had ({error}). Give a file with --weights."
        ) from None


def _load(encoder: Encoder, tensors: dict[str, Tensor], source: str) -> None:
    """Under the names the backbone has, whatever stands before them; layers after the feature are left out."""
    wanted = encoder.backbone.state_dict()
    found = max((_under(tensors, first + second) for first in PREFIXES for second in PREFIXES), key=_matches(wanted))
    missing = [key for key in wanted if key not in found and not key.endswith("num_batches_tracked")]
    wrong = [key for key in wanted if key in found and found[key].shape != wanted[key].shape]
    if missing or wrong:
        parts = []
        if missing:
            parts.append(f"{len(missing)} of {len(wanted)} tensors are not there ({', '.join(missing[:3])}, ...)")
        if wrong:
            key = wrong[0]
            shapes = f"{key} is {list(found[key].shape)}, not {list(wanted[key].shape)}"
            parts.append(f"{len(wrong)} have another shape ({shapes})")
        unknown = [key for key in found if key not in wanted]
        if unknown:
            parts.append(f"{len(unknown)} are unknown ({', '.join(unknown[:3])}, ...)")
        raise ValueError(
            f"{source} is not of {encoder.spec.name} with the {encoder.spec.stem} stem: {'; '.join(parts)}"
        )
    nn.Module.load_state_dict(encoder.backbone, {**wanted, **{key: found[key] for key in wanted if key in found}})


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _matches(wanted: dict[str, Tensor]):
    return lambda found: sum(key in wanted for key in found)

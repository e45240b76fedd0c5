"""Weights from elsewhere: torchvision, timm, Hugging Face, MoCo, DINO, lightly, whatever they are wrapped in."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from millionway.model.encoder import Encoder
from millionway.settings.resolve import PLAIN_RESNETS

WRAPPERS = ("state_dict", "model", "model_state", "teacher", "student")
IN_FOLDERS = ("encoder.safetensors", "model.safetensors", "pytorch_model.bin")
NOT_LEARNED = "num_batches_tracked"
IMAGENET = "imagenet"
"""instead of a file: what the library offers"""


def read_tensors(path: Path, flag: str) -> dict[str, Tensor]:
    """The tensors of a .safetensors or torch file, or of a folder with one, out of what they are wrapped in.

    Nothing but tensors is unpickled. flag: the option that named the file.
    """
    what = f"{flag} {path}"
    if path.is_dir():
        found = next((path / name for name in IN_FOLDERS if (path / name).is_file()), None)
        if found is None:
            raise ValueError(f"{what}: there is no {', '.join(IN_FOLDERS[:-1])} or {IN_FOLDERS[-1]} in this folder")
        path = found
    if not path.is_file():
        raise ValueError(f"{what}: no such file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{what}: not a safetensors file ({error})") from None
    except Exception as error:  # torch raises anything here, and a foreign class is refused by name
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{what}: not a file of tensors alone ({reason})") from None
    while isinstance(content, dict):
        inner = next((content[key] for key in WRAPPERS if isinstance(content.get(key), dict)), None)
        if inner is None:
            break
        content = inner
    tensors = {k: v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, dict) else {}
    if not tensors:
        raise ValueError(f"{what}: there are no named tensors in it")
    return tensors


def library_weights(name: str, flag: str, remedy: str) -> dict[str, Tensor]:
    """What torchvision or timm offers for download; most were trained with ImageNet's labels."""
    library, _, short = name.partition("/")
    try:
        if library == "torchvision":
            import torchvision

            return torchvision.models.get_model(short, weights="DEFAULT").state_dict()
        import timm

        return timm.create_model(short, pretrained=True).state_dict()
    except Exception as error:  # no network, or no such weights: the remedy is the same
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{flag}: {name}'s own weights could not be had ({reason}). {remedy}") from None


def first_tensors(path: Path, encoder: str, flag: str) -> dict[str, Tensor]:
    """What a run can begin with: a file, or `imagenet`."""
    if str(path) != IMAGENET or path.exists():
        return read_tensors(path, flag)
    if encoder == "narrow-resnet":
        raise ValueError(f"{flag} imagenet: the narrow ResNet has no public weights; add --encoder resnet18")
    return library_weights(
        encoder, f"{flag} imagenet", f"Without a network, copy a weight file here and give {flag} FILE."
    )


def stem_of(tensors: dict[str, Tensor], name: str) -> Literal["standard", "small"] | None:
    """A ResNet's weights say which they have: its first convolution is 7 x 7 or 3 x 3. None where they do not say."""
    firsts = [t for t in tensors.values() if t.ndim == 4 and t.shape[1] == 3 and t.shape[-1] in (3, 7)]
    if not firsts or not re.fullmatch(PLAIN_RESNETS, name):
        return None
    return "standard" if firsts[0].shape[-1] == 7 else "small"


@dataclass(frozen=True)
class Match:
    """Which tensors of a file an encoder can take."""

    name: str
    stem: str
    found: dict[str, Tensor]
    """of the right shape, under the encoder's own names"""
    wanted: dict[str, Tensor]
    wrong: list[str]
    """they have another shape"""
    shapes: str
    """of the first of them"""
    unknown: list[str]
    """the encoder has no such thing: a classification layer, a head"""

    @property
    def learned(self) -> list[str]:
        return [key for key in self.wanted if not key.endswith(NOT_LEARNED)]

    @property
    def missing(self) -> list[str]:
        return [key for key in self.learned if key not in self.found and key not in self.wrong]

    @property
    def num_taken(self) -> int:
        return sum(key in self.found for key in self.learned)

    def differences(self, source: str) -> str:
        """Why the file is not of this encoder."""
        parts = []
        if self.missing:
            names = ", ".join(self.missing[:3])
            parts.append(f"{len(self.missing)} of {len(self.wanted)} tensors are not there ({names}, ...)")
        if self.wrong:
            parts.append(f"{len(self.wrong)} have another shape ({self.shapes})")
        if self.unknown:
            parts.append(f"{len(self.unknown)} are unknown ({', '.join(self.unknown[:3])}, ...)")
        return f"{source} is not of {self.name} with the {self.stem} stem: {'; '.join(parts)}"


def match(encoder: Encoder, tensors: dict[str, Tensor]) -> Match:
    """Under the names that the backbone has, whatever stands before them; layers after the feature are left out."""
    wanted = encoder.backbone.state_dict()
    children = [name for name, _ in encoder.backbone.named_children()]
    best = max((_under(tensors, prefix, children) for prefix in _prefixes(tensors, wanted)), key=_matches(wanted))
    best = {key: _resized(encoder.backbone, key, tensor, wanted) for key, tensor in best.items()}
    right = {key for key in wanted if key in best and best[key].shape == wanted[key].shape}
    wrong = [key for key in wanted if key in best and key not in right]
    shapes = f"{wrong[0]} is {list(best[wrong[0]].shape)}, not {list(wanted[wrong[0]].shape)}" if wrong else ""
    found, unknown = {key: best[key] for key in right}, [key for key in best if key not in wanted]
    return Match(encoder.spec.name, encoder.spec.stem, found, wanted, wrong, shapes, unknown)


def take(encoder: Encoder, matched: Match) -> None:
    nn.Module.load_state_dict(encoder.backbone, {**matched.wanted, **matched.found})


def _prefixes(tensors: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """What stands before names that the encoder knows, in the order of the file: its first network comes first."""
    ends = [name for name in wanted if not name.endswith(NOT_LEARNED)][:8]
    found = [key.removesuffix(end) for end in ends for key in tensors if key.endswith(end)]
    # A Sequential of a network's children has numbers for names: lightly's way.
    found += [match[1] for key in tensors if (match := re.match(r"(|.*\.)0\.weight$", key))]
    return ["", *dict.fromkeys(found)]


def _under(tensors: dict[str, Tensor], prefix: str, children: list[str]) -> dict[str, Tensor]:
    """Tensors below a prefix, without it; numbered children by their names."""
    below = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    firsts = {key.partition(".")[0] for key in below}
    if "0" not in firsts or not all(first.isdigit() for first in firsts) or max(map(int, firsts)) >= len(children):
        return below
    return {f"{children[int(key.partition('.')[0])]}.{key.partition('.')[2]}": value for key, value in below.items()}


def _matches(wanted: dict[str, Tensor]):
    return lambda found: sum(key in wanted and found[key].shape == wanted[key].shape for key in found)


def _resized(backbone: nn.Module, key: str, tensor: Tensor, wanted: dict[str, Tensor]) -> Tensor:
    """Places of a ViT's patches, for another image size."""
    if key != "pos_embed" or key not in wanted or tensor.shape == wanted[key].shape or tensor.ndim != 3:
        return tensor
    grid = getattr(getattr(backbone, "patch_embed", None), "grid_size", None)
    if grid is None or tensor.shape[-1] != wanted[key].shape[-1]:
        return tensor
    from timm.layers import resample_abs_pos_embed  # pyright: ignore[reportPrivateImportUsage]

    num_others = wanted[key].shape[1] - grid[0] * grid[1]  # the class token has no place
    return resample_abs_pos_embed(tensor, list(grid), num_prefix_tokens=num_others)

"""The weights alone, under the names of torchvision or timm."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import torch
from torch import Tensor

from millionway.files import replacing, write_whole
from millionway.model.encoder import EncoderSpec
from millionway.settings.resolve import PLAIN_RESNETS


def write_safetensors(source: Path, out: Path) -> None:
    with replacing(out) as aside:
        shutil.copyfile(source, aside)


def write_torch(spec: EncoderSpec, state: dict[str, Tensor], out: Path) -> None:
    """A file for torch.load(weights_only=True); what rebuilds the encoder is written beside it as .json."""
    with replacing(out) as aside:
        torch.save(state, aside)
    write_whole(out.with_suffix(".json"), json.dumps(dataclasses.asdict(spec), indent=2) + "\n")


def how_to_load_weights(spec: EncoderSpec, out: Path, format: str) -> list[str]:
    library, _, name = spec.name.partition("/")
    if format == "safetensors":
        lines, read = ["import safetensors.torch", "import torch"], f"safetensors.torch.load_file({str(out)!r})"
    else:
        lines, read = ["import torch"], f"torch.load({str(out)!r})"
    if library == "timm":
        options = "".join(f", {key}={value!r}" for key, value in spec.options.items())
        lines += ["import timm", f"model = timm.create_model({name!r}, num_classes=0{options})"]
    elif re.fullmatch(PLAIN_RESNETS, spec.name):
        lines += ["import torchvision", f"model = torchvision.models.{name}()", "model.fc = torch.nn.Identity()"]
    else:
        lines += ["from millionway.model.encoder import EncoderSpec, build_encoder"]
        lines += [f"model = build_encoder({spec}).backbone  # without millionway: --format pt2 or onnx"]
    if spec.stem == "small" and re.fullmatch(PLAIN_RESNETS, spec.name):
        lines += ["model.conv1 = torch.nn.Conv2d(3, model.conv1.out_channels, 3, padding=1, bias=False)"]
        lines += ["model.maxpool = torch.nn.Identity()"]
    return [*lines, f"model.load_state_dict({read}, strict=True)"]

"""The encoder's weights as a file for torchvision, timm or plain PyTorch."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import torch

from millionway.files import check_new, replacing, write_whole
from millionway.model.encoder import PLAIN_RESNETS, EncoderSpec
from millionway.model.encoder_file import encoder_path, read_encoder_file

FORMATS = ("safetensors", "torch")


def export(run: Path, out: Path, format: str = "safetensors") -> Path:
    """Write the backbone's state dict under the names of its own library; the last layer is not in it.

    torch: a file for torch.load(weights_only=True); what rebuilds the encoder is written beside it as .json.
    """
    if format not in FORMATS:
        raise ValueError(f"--format {format}: there are {' and '.join(FORMATS)}")
    path = encoder_path(run)
    spec, state = read_encoder_file(path)
    check_new(out)
    if format == "torch":
        check_new(out.with_suffix(".json"))
    with replacing(out) as aside:
        if format == "safetensors":
            shutil.copyfile(path, aside)
        else:
            torch.save(state, aside)
            write_whole(out.with_suffix(".json"), json.dumps(dataclasses.asdict(spec), indent=2) + "\n")
    return out


def how_to_load(spec: EncoderSpec, out: Path, format: str) -> str:
    """Python lines that load the exported file, as they can be pasted."""
    library, _, name = spec.name.partition("/")
    if format == "safetensors":
        lines, read = ["import safetensors.torch", "import torch"], f"safetensors.torch.load_file({str(out)!r})"
    else:
        lines, read = ["import torch"], f"torch.load({str(out)!r})"
    if library == "timm":
        lines += ["import timm", f"model = timm.create_model({name!r}, num_classes=0)"]
    elif re.fullmatch(PLAIN_RESNETS, spec.name):
        lines += ["import torchvision", f"model = torchvision.models.{name}()", "model.fc = torch.nn.Identity()"]
    else:
        lines += ["from millionway.model.encoder import PLAIN_RESNETS, EncoderSpec, build_encoder"]
        lines += [f"model = build_encoder({spec}).backbone"]
    if spec.stem == "small" and library:
        lines += ["model.conv1 = torch.nn.Conv2d(3, model.conv1.out_channels, 3, padding=1, bias=False)"]
        lines += ["model.maxpool = torch.nn.Identity()"]
    lines += [f"model.load_state_dict({read}, strict=True)"]
    lines += [f"# input: {spec.image_size} px, colors from 0 to 1, then (x - {spec.mean}) / {spec.std}"]
    return "\n".join(lines)

"""The encoder's weights as a file for torchvision, timm or plain PyTorch."""

import dataclasses
import json
import pickle
import re
import shutil
from pathlib import Path

import torch

from millionway.files import check_new, replacing, write_whole
from millionway.model.encoder import PLAIN_RESNETS, EncoderSpec
from millionway.model.encoder_file import encoder_path, read_encoder_file

DETECTRON2 = r"(torchvision|timm)/resnet(18|34|50|101|152)"
FORMATS = ("safetensors", "torch", "detectron2")


def export(run: Path, out: Path, format: str = "safetensors") -> Path:
    """Write the backbone's state dict under the names of its own library; the last layer is not in it.

    torch: a file for torch.load(weights_only=True); what rebuilds the encoder is written beside it as .json.
    detectron2: a pickle of numpy arrays under the names of its ResNets, for MODEL.WEIGHTS.
    """
    if format not in FORMATS:
        raise ValueError(f"--format {format}: there are {', '.join(FORMATS)}")
    path = encoder_path(run)
    spec, state = read_encoder_file(path)
    if format == "detectron2" and (spec.stem == "small" or not re.fullmatch(DETECTRON2, spec.name)):
        raise ValueError(
            f"--format detectron2 is for ResNets with the standard stem, not {spec.name}, {spec.stem} stem"
        )
    if format == "detectron2" and out.suffix != ".pkl":
        raise ValueError(f"--out {out}: detectron2 reads such a file only if its name ends in .pkl")
    check_new(out)
    if format == "torch":
        check_new(out.with_suffix(".json"))
    with replacing(out) as aside:
        if format == "safetensors":
            shutil.copyfile(path, aside)
        elif format == "detectron2":
            arrays = {name: state[key].numpy() for key, name in detectron2_names(list(state)).items()}
            content = {"model": arrays, "__author__": "millionway", "matching_heuristics": True}
            aside.write_bytes(pickle.dumps(content))
        else:
            torch.save(state, aside)
            write_whole(out.with_suffix(".json"), json.dumps(dataclasses.asdict(spec), indent=2) + "\n")
    return out


def detectron2_names(keys: list[str]) -> dict[str, str]:
    """{torchvision's name: detectron2's name} for a ResNet. A norm belongs to the convolution before it there."""
    names = {}
    for key in keys:
        *place, module, leaf = key.split(".")
        if leaf == "num_batches_tracked":
            continue
        if place and place[-1] == "downsample":
            place, module = place[:-1], "shortcut" if module == "0" else "shortcut.norm"
        module = re.sub(r"^bn(\d)$", r"conv\1.norm", module)
        stage = f"res{int(place[0][-1]) + 1}.{place[1]}" if place else "stem"
        names[key] = f"{stage}.{module}.{leaf}"
    return names


def how_to_load(spec: EncoderSpec, out: Path, format: str) -> str:
    """Python lines that load the exported file, as they can be pasted."""
    library, _, name = spec.name.partition("/")
    if format == "detectron2":
        mean, std = ([round(255 * value, 3) for value in values] for values in (spec.mean, spec.std))
        lines = [f"cfg.MODEL.WEIGHTS = {str(out)!r}", "cfg.INPUT.FORMAT = 'RGB'", f"cfg.MODEL.PIXEL_MEAN = {mean}"]
        lines += [f"cfg.MODEL.PIXEL_STD = {std}", "cfg.MODEL.RESNETS.STRIDE_IN_1X1 = False"]
        depth = int(name.removeprefix("resnet"))
        lines += [f"cfg.MODEL.RESNETS.DEPTH = {depth}", *(["cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 64"] * (depth < 50))]
        lines += ["cfg.MODEL.RESNETS.NORM = 'SyncBN'  # its statistics are trained", "cfg.MODEL.BACKBONE.FREEZE_AT = 0"]
        return "\n".join(lines)
    if format == "safetensors":
        lines, read = ["import safetensors.torch", "import torch"], f"safetensors.torch.load_file({str(out)!r})"
    else:
        lines, read = ["import torch"], f"torch.load({str(out)!r})"
    if library == "timm":
        lines += ["import timm", f"model = timm.create_model({name!r}, num_classes=0)"]
    elif re.fullmatch(PLAIN_RESNETS, spec.name):
        lines += ["import torchvision", f"model = torchvision.models.{name}()", "model.fc = torch.nn.Identity()"]
    else:
        lines += ["from millionway.model.encoder import EncoderSpec, build_encoder"]
        lines += [f"model = build_encoder({spec}).backbone"]
    if spec.stem == "small" and re.fullmatch(PLAIN_RESNETS, spec.name):
        lines += ["model.conv1 = torch.nn.Conv2d(3, model.conv1.out_channels, 3, padding=1, bias=False)"]
        lines += ["model.maxpool = torch.nn.Identity()"]
    lines += [f"model.load_state_dict({read}, strict=True)"]
    lines += [f"# input: {spec.image_size} px, colors from 0 to 1, then (x - {spec.mean}) / {spec.std}"]
    return "\n".join(lines)

"""A ResNet's weights for detectron2: a pickle of numpy arrays under its names, for MODEL.WEIGHTS."""

import pickle
import re
from pathlib import Path

from torch import Tensor

from millionway.files import replacing
from millionway.model.encoder import EncoderSpec

KNOWN = r"(torchvision|timm)/resnet(18|34|50|101|152)"


def check_detectron2(spec: EncoderSpec, out: Path) -> None:
    if spec.stem == "small" or not re.fullmatch(KNOWN, spec.name):
        raise ValueError(
            f"--format detectron2 is for ResNets with the standard stem, not {spec.name}, {spec.stem} stem"
        )
    if out.suffix != ".pkl":
        raise ValueError(f"--out {out}: detectron2 reads such a file only if its name ends in .pkl")


def write_detectron2(state: dict[str, Tensor], out: Path) -> None:
    arrays = {name: state[key].numpy() for key, name in detectron2_names(list(state)).items()}
    content = {"model": arrays, "__author__": "millionway", "matching_heuristics": True}
    with replacing(out) as aside:
        aside.write_bytes(pickle.dumps(content))


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


def how_to_load_in_detectron2(spec: EncoderSpec, out: Path) -> list[str]:
    mean, std = ([round(255 * value, 3) for value in values] for values in (spec.mean, spec.std))
    lines = [f"cfg.MODEL.WEIGHTS = {str(out)!r}", "cfg.INPUT.FORMAT = 'RGB'", f"cfg.MODEL.PIXEL_MEAN = {mean}"]
    lines += [f"cfg.MODEL.PIXEL_STD = {std}", "cfg.MODEL.RESNETS.STRIDE_IN_1X1 = False"]
    depth = int(spec.name.rpartition("resnet")[2])
    lines += [f"cfg.MODEL.RESNETS.DEPTH = {depth}", *(["cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 64"] * (depth < 50))]
    return [
        *lines,
        "cfg.MODEL.RESNETS.NORM = 'SyncBN'  # its statistics are trained",
        "cfg.MODEL.BACKBONE.FREEZE_AT = 0",
    ]

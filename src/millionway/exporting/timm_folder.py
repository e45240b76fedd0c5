"""A folder that timm and transformers load as it is: weights, config.json, and a model card made from the run."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from millionway.exporting.model_card import model_card
from millionway.files import write_whole
from millionway.model.encoder import EncoderSpec
from millionway.tensor_file import write_tensors

# torchvision's models that timm builds with the same names of weights.
SHARED_NAMES = r"resnet(18|34|50|101|152)|wide_resnet(50|101)_2|resnext50_32x4d|resnext101_32x8d|resnext101_64x4d"


def timm_name(spec: EncoderSpec, format: str) -> str:
    """The model that timm builds; ValueError if it has none with these weights."""
    library, _, name = spec.name.partition("/")
    known = library == "timm" or (library == "torchvision" and re.fullmatch(SHARED_NAMES, name))
    if not known or spec.stem == "small":
        stem = ", small stem" if spec.stem == "small" else ""
        raise ValueError(
            f"--format {format}: timm has no {spec.name}{stem}, so nobody could build it from weights alone. "
            "Use --format pt2 or onnx: their file holds the network itself."
        )
    return name


def write_timm_folder(spec: EncoderSpec, state: dict[str, Tensor], run: Path, out: Path, format: str) -> None:
    """run: the run folder, or the encoder's file alone."""
    name = timm_name(spec, format)
    card = model_card(spec, name, run, out.name)
    out.mkdir()
    try:
        write_tensors(out / "model.safetensors", state, {"format": "pt"})
        write_whole(out / "README.md", card)
        write_whole(out / "config.json", json.dumps(_config(spec, name, state), indent=2) + "\n")
    except BaseException:
        shutil.rmtree(out)
        raise


def _config(spec: EncoderSpec, name: str, state: dict[str, Tensor]) -> dict[str, Any]:
    import timm

    model = timm.create_model(name, num_classes=0, **spec.options)
    model.load_state_dict(state, strict=True)
    known: Any = model.pretrained_cfg
    size = spec.image_size
    return {
        "architecture": name,
        "num_classes": 0,
        "num_features": model.num_features,
        "model_args": dict(spec.options),
        "model_type": "timm_wrapper",
        "architectures": ["TimmWrapperModel"],
        "pretrained_cfg": {
            "input_size": [3, size, size],
            "mean": list(spec.mean),
            "std": list(spec.std),
            "interpolation": "bilinear",
            "crop_pct": 1.0 if size <= 64 else 0.875,
            "crop_mode": "center",
            "num_classes": 0,
            "first_conv": known.get("first_conv"),
            "classifier": known.get("classifier"),
        },
    }

"""What can be set when an encoder is exported."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Export:
    """Write the encoder for other people's software."""

    run: Path
    """the run folder, or an encoder.safetensors"""
    out: Path
    """the file or folder to make"""
    _: KW_ONLY
    format: Literal["safetensors", "torch", "onnx", "pt2", "timm", "huggingface", "detectron2"] = "safetensors"
    """safetensors, torch: weights by name. onnx, pt2: the whole network in one file. timm, huggingface: a folder with a
    model card. detectron2: for MODEL.WEIGHTS there"""
    from_bytes: bool = False
    """onnx and pt2 take RGB bytes of any size: crop, resize and normalization are in the file"""

"""The encoder in other people's formats: which there are, and how each is loaded."""

import logging
from pathlib import Path

from millionway.exporting.detectron2 import check_detectron2, how_to_load_in_detectron2, write_detectron2
from millionway.exporting.model_card import how_to_load_folder
from millionway.exporting.onnx_file import write_onnx
from millionway.exporting.program import write_program
from millionway.exporting.timm_folder import timm_name, write_timm_folder
from millionway.exporting.weights import how_to_load_weights, write_safetensors, write_torch
from millionway.files import check_new
from millionway.model.encoder import EncoderSpec
from millionway.model.encoder_file import encoder_path, load_encoder, read_encoder_file
from millionway.settings.export import Export

log = logging.getLogger("millionway")

GRAPHS = ("onnx", "pt2")
FOLDERS = ("timm", "huggingface")


def export(asked: Export) -> Path:
    """Write the encoder; returns the file or folder.

    safetensors, torch: weights under the names of the encoder's own library, without the last layer. onnx, pt2: the
    whole network in one file, which needs no library of models; with `from_bytes` it takes RGB bytes of any size. timm,
    huggingface: a folder with a model card, for timm and transformers alike.
    """
    out, format, from_bytes = asked.out, asked.format, asked.from_bytes
    if from_bytes and format not in GRAPHS:
        raise ValueError(f"--from-bytes is for --format {' and '.join(GRAPHS)}; {format} holds weights alone")
    source = encoder_path(asked.run)
    spec, state = read_encoder_file(source)
    if format == "detectron2":
        check_detectron2(spec, out)
    if format in FOLDERS:
        timm_name(spec, format)
    check_new(out)
    if format == "safetensors":
        write_safetensors(source, out)
    elif format == "torch":
        check_new(out.with_suffix(".json"))
        write_torch(spec, state, out)
    elif format == "detectron2":
        write_detectron2(state, out)
    elif format in FOLDERS:
        write_timm_folder(spec, state, asked.run, out, format)
    else:
        write = {"onnx": write_onnx, "pt2": write_program}[format]
        off = write(load_encoder(source), out, from_bytes)
        log.info("features of photos differ from the encoder's own by at most %.1g of the largest", off)
    return out


def how_to_load(spec: EncoderSpec, out: Path, format: str, from_bytes: bool = False) -> str:
    """Python lines that load the exported file, as they can be pasted."""
    size = spec.image_size
    lines = {
        "detectron2": lambda: how_to_load_in_detectron2(spec, out),
        "onnx": lambda: [
            "import onnxruntime",
            f"session = onnxruntime.InferenceSession({str(out)!r})",
            "(features,) = session.run(None, {'images': images})",
        ],
        "pt2": lambda: [
            "import torch",
            f"model = torch.export.load({str(out)!r}).module()",
            "features = model(images)",
        ],
        **{format: lambda: how_to_load_folder(str(out)) for format in FOLDERS},
    }.get(format, lambda: how_to_load_weights(spec, out, format))()
    if from_bytes:
        return "\n".join([*lines, "# images: RGB bytes (uint8), [batch, height, width, 3], of any size"])
    if format in GRAPHS:
        return "\n".join([*lines, f"# images: [batch, 3, {size}, {size}], colors from 0 to 1"])
    if format != "detectron2":
        lines.append(f"# input: {size} px, colors from 0 to 1, then (x - {spec.mean}) / {spec.std}")
    return "\n".join(lines)

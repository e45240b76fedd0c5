"""encoder.safetensors: the weights of the backbone under its own names, and in the header all that rebuilds it.

The header also has a seal: the checksum of weights and description.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from millionway.files import BadFile, replacing
from millionway.model.encoder import Encoder, EncoderSpec, build_encoder, full_name
from millionway.seals import check_fields, opened, sealed
from millionway.tensor_file import write_tensors

START = "start.safetensors"  # of a run: the given weights that it began with
HEADER, WEIGHTS = "millionway_encoder", "weights_sha256"
MIN_SIZE, MAX_SIZE = 8, 4096  # pixels
DAMAGED = "Take a copy of the file, or let the run write it again: --resume"


def save_encoder(encoder: Encoder, path: Path, **notes: str) -> None:
    """`notes` go into the header."""
    state = {name: tensor.contiguous() for name, tensor in encoder.backbone.state_dict().items()}
    # A single entry: safetensors writes several in any order, and equal encoders should be equal files.
    about = {**dataclasses.asdict(encoder.spec), **notes, WEIGHTS: tensors_hash(state)}
    with replacing(path) as aside:
        write_tensors(aside, state, {HEADER: json.dumps(sealed(about))})


def tensors_hash(state: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def encoder_path(run: Path) -> Path:
    """The file of a run folder, or the file itself."""
    return run / "encoder.safetensors" if run.is_dir() else run


def is_ours(path: Path) -> bool:
    """Whether the file says which encoder it is."""
    try:
        with safe_open(path, "pt") as file:
            return HEADER in (file.metadata() or {})
    except (SafetensorError, OSError, ValueError):
        return False


def load_encoder(path: Path | str) -> Encoder:
    """The encoder as it was saved, in eval mode. `path`: the file, or the run folder it is in."""
    path = encoder_path(Path(path))
    spec, state = read_encoder_file(path)
    encoder = build_encoder(spec)
    try:
        encoder.backbone.load_state_dict(state, strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise BadFile(path, f"the weights do not fit {spec.name}: {reason:.300}") from None
    return encoder.eval()


def read_encoder_file(path: Path) -> tuple[EncoderSpec, dict]:
    if not path.is_file():
        in_run = (path.parent / "config.json").is_file()
        hint = (
            "The run writes it at its first evaluation." if in_run else "Give a run folder or an encoder.safetensors."
        )
        raise BadFile(path, "no such file", hint)
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError) as error:
        raise BadFile(path, f"not a safetensors file ({error})") from None
    if HEADER not in header:
        raise BadFile(path, "its header does not say which encoder it is, so it was not written by millionway")
    about = opened(path, header[HEADER], DAMAGED)
    if WEIGHTS in about and about[WEIGHTS] != tensors_hash(state):
        raise BadFile(path, "its weights are not as they were written: their checksum is wrong", DAMAGED)
    broken = [name for name, tensor in state.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise BadFile(path, f"it has weights that are not finite (NaN or infinity): {broken[0]}")
    return _spec(path, about), state


def _spec(path: Path, about: dict[str, Any]) -> EncoderSpec:
    """What the header says, if an encoder can be so."""
    check_fields(path, about, name=str, stem=str, image_size=int, mean=list, std=list)
    for name in ("mean", "std"):
        values, colors = about[name], [f"{name} of {color}" for color in ("red", "green", "blue")]
        check_fields(path, dict(zip(colors, values)), **dict.fromkeys(colors, (int, float)))
        if len(values) != 3 or (name == "std" and min(values) <= 0):
            raise BadFile(path, f"{name} is {values!r:.60}, and should be three numbers, above 0 for std")
    if about["stem"] not in ("standard", "small") or not MIN_SIZE <= about["image_size"] <= MAX_SIZE:
        raise BadFile(path, f"no encoder has stem {about['stem']!r:.20} and {about['image_size']} px")
    spec = EncoderSpec(about["name"], about["stem"], about["image_size"], tuple(about["mean"]), tuple(about["std"]))
    try:
        return dataclasses.replace(spec, name=full_name(spec.name))
    except ValueError as error:
        raise BadFile(path, str(error)) from None

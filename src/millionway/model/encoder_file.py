"""encoder.safetensors: the weights of the backbone under its own names, and in the header all that rebuilds it."""

import dataclasses
import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from millionway.files import replacing
from millionway.model.encoder import Encoder, EncoderSpec, build_encoder


def save_encoder(encoder: Encoder, path: Path, **notes: str) -> None:
    """`notes` go into the header."""
    state = {name: tensor.contiguous() for name, tensor in encoder.backbone.state_dict().items()}
    # A single entry: safetensors writes several in any order, and equal encoders should be equal files.
    header = {"millionway_encoder": json.dumps({**dataclasses.asdict(encoder.spec), **notes})}
    with replacing(path) as aside:
        save_file(state, aside, header)


def encoder_path(run: Path) -> Path:
    """The file of a run folder, or the file itself."""
    return run / "encoder.safetensors" if run.is_dir() else run


def load_encoder(path: Path | str) -> Encoder:
    """The encoder as it was saved, in eval mode. `path`: the file, or the run folder it is in."""
    path = encoder_path(Path(path))
    spec, state = read_encoder_file(path)
    encoder = build_encoder(spec)
    try:
        encoder.backbone.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ValueError(f"{path}: the weights do not fit {spec.name}: {error}") from None
    return encoder.eval()


def read_encoder_file(path: Path) -> tuple[EncoderSpec, dict]:
    if not path.is_file():
        in_run = (path.parent / "config.json").is_file()
        hint = (
            "The run writes it at its first evaluation." if in_run else "Give a run folder or an encoder.safetensors."
        )
        raise ValueError(f"{path}: no such file. {hint}")
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file ({error})") from None
    if "millionway_encoder" not in header:
        raise ValueError(f"{path}: its header does not say which encoder it is, so it was not written by millionway")
    stored = json.loads(header["millionway_encoder"])
    fields = {field.name: stored[field.name] for field in dataclasses.fields(EncoderSpec)}
    return EncoderSpec(**{**fields, "mean": tuple(fields["mean"]), "std": tuple(fields["std"])}), state

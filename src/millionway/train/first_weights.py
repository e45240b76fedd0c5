"""--init-from: an encoder that begins with weights from elsewhere, and the settings that follow from them."""

from pathlib import Path

import torch

from millionway.evaluation.subject import input_of
from millionway.model.encoder import Encoder
from millionway.model.encoder_file import encoder_path, is_ours, read_encoder_file
from millionway.model.foreign_weights import first_tensors, match, stem_of, take
from millionway.settings import pretrain as settings
from millionway.settings.pretrain import IMAGENET_MEAN, IMAGENET_STD, Pretrain

ENOUGH = 0.9  # share of the encoder's tensors that the file must have
FLAG = "--init-from"


def as_the_weights_are(config: Pretrain) -> Pretrain:
    """Encoder, stem, mean and std of the file, where the user has not asked for others. Reads no more than it must."""
    path = config.init_from
    assert path is not None
    if is_ours(encoder_path(path)):
        spec, _ = _ours(path)
        encoder = config.model.encoder or spec.name
        stem = spec.stem if config.model.stem == "auto" else config.model.stem
        own = (spec.mean, spec.std)
    else:
        if config.model.encoder is None:
            example = "--encoder resnet50, --encoder timm/convnext_tiny"
            raise ValueError(f"{FLAG} {path}: which network is it? Say so by --encoder, for example {example}")
        encoder, stem = config.model.encoder, config.model.stem
        if stem == "auto":
            stem = stem_of(first_tensors(path, encoder, FLAG), encoder) or stem
        own = input_of(encoder)[1:]
    mean, std = config.images.mean, config.images.std
    if (mean, std) == (IMAGENET_MEAN, IMAGENET_STD):  # nobody asked for others
        mean, std = own
    return settings.with_settings(config, encoder=encoder, stem=stem, mean=mean, std=std)


def take_weights(encoder: Encoder, path: Path) -> str:
    """Returns in words how many tensors were taken; refuses a file with too few of them, or with NaN."""
    spec = encoder.spec
    if is_ours(encoder_path(path)):
        theirs, tensors = _ours(path)
        if (theirs.name, theirs.stem) != (spec.name, spec.stem):
            raise ValueError(
                f"{FLAG} {path} is {theirs.name} with the {theirs.stem} stem, this run trains {spec.name} with the "
                f"{spec.stem} stem; set --encoder and --stem alike"
            )
    else:
        tensors = first_tensors(path, spec.name, FLAG)
    matched = match(encoder, tensors)
    if matched.num_taken < ENOUGH * len(matched.learned):
        raise ValueError(
            f"{FLAG}: {matched.differences(str(path))}. Only {matched.num_taken} of {len(matched.learned)} tensors "
            "would be taken; give the --encoder and --stem that the file was made with"
        )
    broken = [name for name, tensor in matched.found.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise ValueError(f"{FLAG} {path} has weights that are not finite (NaN or infinity): {broken[0]}")
    take(encoder, matched)
    others = [f"new: {', '.join(matched.missing + matched.wrong)}"] if matched.missing or matched.wrong else []
    if matched.unknown:
        places = sorted({key.rpartition(".")[0] or key for key in matched.unknown})
        others.append(f"left out: {', '.join(places[:3])}{', ...' if len(places) > 3 else ''}")
    more = f" ({'; '.join(others)})" if others else ""
    return f"{matched.num_taken} of {len(matched.learned)} tensors of the encoder are from {path}{more}"


def _ours(path: Path):
    try:
        return read_encoder_file(encoder_path(path))
    except ValueError as error:
        raise ValueError(f"{FLAG} {error}") from None

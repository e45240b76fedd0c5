"""What happens before the first step: the run folder, the images, the networks, and what may change on resume."""

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import torch
from torch.optim.optimizer import ParamsT

from millionway.console import track
from millionway.data.dataset import Dataset, has_test_images, open_dataset
from millionway.data.kinds.choose import has_test_split, is_named, open_source
from millionway.data.kinds.remote import is_remote
from millionway.data.source import Source
from millionway.evaluation.features import no_labels
from millionway.machine import describe_environment, has_bfloat16, num_cores, num_local_ranks
from millionway.model.classifier import InstanceClassifier
from millionway.model.encoder import Encoder, EncoderSpec, build_encoder, feature_dim
from millionway.model.foreign_weights import IMAGENET
from millionway.model.head import build_head
from millionway.model.network import Network
from millionway.model.row_store import FileStore
from millionway.parallel.collectives import all_gather_object, any_rank
from millionway.parallel.group import Group
from millionway.parallel.sync_bn import synchronize
from millionway.run_folder import ENVIRONMENT
from millionway.seals import write_json
from millionway.settings import pretrain as settings
from millionway.settings import resolve as rules
from millionway.settings.checks import flag
from millionway.settings.pretrain import EncoderPrecision, Pretrain
from millionway.settings.stored import run_settings, write_settings
from millionway.train.first_weights import take_weights
from millionway.train.muon import Muon
from millionway.train.state import State

log = logging.getLogger("millionway")

PLAIN_SETTINGS = {"encoder", "image_size", "first_size", "batch_size"}
"""what was chosen for them is always said, and of the others with --verbose and in the run's train.log"""


def compare_settings(group: Group, config: Pretrain) -> None:
    """All ranks must have been given the same; folders and threads may be each machine's own."""
    everybody = all_gather_object(group, settings.flat(config))
    for rank, theirs in enumerate(everybody):
        for name, value in everybody[0].items():
            if theirs[name] != value and name not in ("data_root", "threads", "rows_in"):
                raise ValueError(
                    f"the processes were started with different settings: {flag(name)} is {value} on rank 0"
                    f" and {theirs[name]} on rank {rank}"
                )


def check_early(config: Pretrain, num_files: int, device: torch.device, group: Group) -> None:
    """Refuse what can be refused before every image has been read."""
    is_fast = device.type == "cuda" or (config.classifier.precision == "bfloat16" and has_bfloat16(device))
    if config.classifier.precision not in (None, "float32") and not is_fast:
        raise ValueError(
            f"--precision {config.classifier.precision} is for CUDA, bfloat16 also for CPUs with instructions for it; "
            "here use float32"
        )
    if device.type != "cuda" and config.classifier.kernel == "triton":
        raise ValueError(f"--kernel triton is for CUDA; on {device.type} use --kernel auto")
    _new_encoder(rules.resolve(config, _facts(num_files, None, device, group)))


def own_cores() -> int:
    """The cores of the machine, shared by the processes on it."""
    return max(1, num_cores() // num_local_ranks())


def open_images(config: Pretrain, source: Source, manifest: Path | None, ask_all: bool) -> Dataset:
    images = config.images
    return open_dataset(
        config.data,
        images.data_root,
        manifest,
        source=source,
        num_threads=torch.get_num_threads(),
        max_unreadable=images.max_unreadable,
        duplicates=images.duplicates,
        progress=track,
        ask_all=ask_all,
    )


def _rows_in(config: Pretrain, is_old: bool) -> str | Path:
    where = config.classifier.rows_in
    return f"{where}.before" if is_old and where not in ("device", "host") else where


def build(
    config: Pretrain, dataset: Dataset, device: torch.device, group: Group, num_instances: int | None = None
) -> tuple[State, EncoderSpec]:
    """Encoder, head, classifier and optimizer, as they are before the first step.

    num_instances: of a classifier from before the images changed; then it is only read.
    """
    model, seed = config.model, config.training.seed
    assert config.training.lr and model.head and model.dim and config.classifier.temperature
    encoder, taken = _new_encoder(config)
    if taken:
        log.info("%s", taken)
    head = build_head(model.head, encoder.feature_dim, model.dim, seed)
    assert model.encoder_precision and config.classifier.precision
    network = Network(encoder, head, model.encoder_precision).to(device)
    if config.training.sync_bn:
        synchronize(network, group, device)
    if config.training.bn == "fixed":
        network.fix_bn_of_encoder()
    classifier = InstanceClassifier(
        num_instances or len(dataset.manifest),
        encoder.feature_dim if model.head == "none" else model.dim,
        config.classifier.temperature,
        group,
        getattr(torch, config.classifier.storage),
        device=device,
        seed=seed,
        classes_per_step=config.classifier.sampled,
        rows_in=_rows_in(config, num_instances is not None),
        kernel=config.classifier.kernel,
        precision=config.classifier.precision,
    )
    if num_instances is not None and isinstance(classifier.store, FileStore):
        classifier.store.path.unlink(missing_ok=True)  # it is read once, and gone when it is closed
    if num_instances is None:
        classifier.alive.copy_(torch.from_numpy(dataset.manifest.readable)[slice(*classifier.local_range)])
    assert config.training.optimizer is not None
    learned = [
        {"params": list(network.encoder.parameters()), "multiple": config.training.encoder_lr or 1.0},
        {"params": list(head.parameters())},
    ]
    optimizer = build_optimizer(
        config.training.optimizer,
        [each for each in learned if each["params"]],
        config.training.lr,
        config.training.momentum,
        config.training.weight_decay,
        model.encoder_precision,
    )
    hardest = None
    if config.classifier.hardest:
        shape = (len(classifier.weight), config.classifier.hardest)
        hardest = torch.zeros(shape, dtype=torch.int32, device=device)
    return State(network, optimizer, classifier, hardest, step=0), encoder.spec


def build_optimizer(
    name: Literal["sgd", "muon"],
    learned: ParamsT,
    lr: float,
    momentum: float,
    weight_decay: float,
    precision: EncoderPrecision,
) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(learned, lr=lr, momentum=momentum, weight_decay=weight_decay)
    return Muon(learned, lr, momentum, weight_decay, torch.bfloat16 if precision == "bfloat16" else None)


def _new_encoder(config: Pretrain) -> tuple[Encoder, str]:
    """(the encoder, which weights it begins with if they are not random)"""
    model, images = config.model, config.images
    assert model.encoder and images.image_size and model.stem != "auto"
    spec = EncoderSpec(model.encoder, model.stem, images.image_size, images.mean, images.std)
    encoder = build_encoder(spec, config.training.seed)
    if isinstance(first := images.first_size, int) and first != images.image_size:
        feature_dim(model.encoder, encoder.backbone, first)  # refuses a size that it does not take
    begins_anew = config.init_from is not None and not config.resume
    return encoder, take_weights(encoder, config.init_from) if begins_anew and config.init_from else ""


def _say_what_runs(asked: Pretrain, resolved: Pretrain, dataset: Dataset, device: torch.device) -> None:
    num, batch_size = len(dataset.instance_ids), resolved.training.batch_size or 1
    log.info("%s: %d images, so a %d-way classifier", resolved.data, num, num)
    steps, rest = divmod(num, batch_size)
    left_over = f"; {rest} images are left over in each epoch, others each time" if rest else ""
    log.debug("%d steps of %d images per epoch%s", steps, batch_size, left_over)
    was, now = settings.flat(asked), settings.flat(resolved)
    chosen = {name: now[name] for name in now if was[name] is None and now[name] is not None}
    if resolved.init_from is None:  # nothing is unusual about them
        usual = asdict(rules.AT_RANDOM) | {"first_size": "full"}
        chosen = {name: value for name, value in chosen.items() if value != usual.get(name)}
    if asked.model.stem == "auto":
        chosen["stem"] = resolved.model.stem
    for names, say in ((PLAIN_SETTINGS & set(chosen), log.info), (set(chosen) - PLAIN_SETTINGS, log.debug)):
        if names:
            values = ", ".join(f"{flag(name)} {value}" for name, value in chosen.items() if name in names)
            say("chosen for this data and device: %s", values)
    if device.type == "cpu" and asked.model.encoder is None:
        log.info("no GPU, so the encoder is the narrow ResNet; --encoder resnet50 takes the paper's")
    if resolved.classifier.smoothing and not resolved.classifier.hardest:
        log.info("too few images for hardest classes: labels are not smoothed")


def write_run_files(run: Path, asked: Pretrain, resolved: Pretrain, dataset: Dataset, device: torch.device) -> None:
    """config.json comes last and whole: where it stands, the run has begun."""
    write_json(run / ENVIRONMENT, json.loads(describe_environment(device)))
    write_settings(run, resolved)
    _say_what_runs(asked, resolved, dataset, device)


def remember_places(run: Path, config: Pretrain) -> None:
    """Where the images of a run are now, for those who come later."""
    stored = run_settings(run)
    places = {name: settings.flat(config)[name] for name in ("data", "test_data", "data_root")}
    moved = settings.with_settings(stored, **places)
    if moved != stored:
        write_settings(run, moved)


def check_test_data(config: Pretrain, source: Source) -> None:
    """Refuse images that could not ask, before any are read."""
    images = config.images
    if images.test_data is None or images.labels == "none":
        return
    what = f"--test-data {images.test_data}"
    if source.labels is None:
        raise no_labels(what, config.data)
    queries = open_source(images.test_data, images.data_root, has_test_split(images.test_data))
    if queries.labels is None:
        raise no_labels(what, images.test_data)
    there = {source.labels.names[label] for label in set(source.labels.ids.tolist()) if label >= 0}
    missing = sorted(set(queries.labels.names) - there)
    if missing:
        raise ValueError(f"{what}: {len(missing)} of its classes have no training image ({', '.join(missing[:5])})")


def resolve(config: Pretrain, dataset: Dataset, device: torch.device, group: Group) -> Pretrain:
    """Every setting has a value."""
    facts = _facts(len(dataset.instance_ids), dataset.small_side(), device, group)
    everywhere = not any_rank(group, not has_bfloat16(device))
    queries = has_test_images(config.data, config.images.test_data)
    facts = replace(facts, has_bfloat16=everywhere, has_test_images=queries)
    resolved = with_absolute_paths(rules.resolve(config, facts))
    if resolved.model.encoder_precision == "bfloat16" and not everywhere:  # it was asked for, or began elsewhere
        log.warning("--encoder-precision bfloat16: there are no instructions for it here, so steps will be very slow")
    return resolved


def with_absolute_paths(config: Pretrain) -> Pretrain:
    """So that it can go on from any working folder."""
    paths = {name: _absolute(settings.flat(config)[name]) for name in ("init_from", "data_root", "manifest")}
    data = {name: _absolute_data(settings.flat(config)[name]) for name in ("data", "test_data")}
    return settings.with_settings(config, **data, **paths)


def _facts(num_images: int, image_side: int | None, device: torch.device, group: Group) -> rules.Facts:
    return rules.Facts(
        num_images, image_side, has_gpu=device.type != "cpu", num_cores=own_cores(), num_ranks=group.size
    )


def _absolute_data(data: str | None) -> str | None:
    return data if data is None or is_named(data) or is_remote(data) else str(_absolute(Path(data)))


def _absolute(path: Path | None) -> Path | None:
    return path if path is None or str(path) == IMAGENET else path.expanduser().resolve()

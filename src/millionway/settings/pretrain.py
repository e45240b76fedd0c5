"""Every setting of a run. The text under a field is its help on the command line.

A field that may be None is chosen when the data and the device are known (`resolve`); what was chosen is logged and
stands in the run's config.json.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from millionway.settings.checks import Duplicates, suggest

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

T = TypeVar("T")
Storage = Literal["float32", "bfloat16"]
# A setting that is chosen by `resolve` unless it is given; the help does not show its None.
Chosen = Annotated[
    T | None, tyro.conf.arg(help_behavior_hint=lambda text: "" if "None" in text else f"(default: {text})")
]


@dataclass(frozen=True)
class Training:
    epochs: int = 100
    """passes over all images, but for the last incomplete batch of each"""
    batch_size: Chosen[int] = None
    """images per step over all processes; by default 256 (512 with a GPU), or an eighth of the images"""
    optimizer: Literal["sgd", "muon"] = "sgd"
    """of encoder and head: SGD as in the paper, or Muon, which learns more per view; rows take SGD with both"""
    lr: Chosen[float] = None
    """peak learning rate; by default 0.48 x batch / 4096, with muon 0.02"""
    warmup_epochs: Chosen[int] = None
    """linear warm-up; by default 10, or 3 below 100 epochs, or 1 up to 10 epochs; then cosine to 0"""
    momentum: float = 0.9
    """of SGD, for encoder, head and rows"""
    weight_decay: float = 1e-4
    """of SGD, for encoder, head and rows"""
    micro_batch: Chosen[int] = None
    """images each process encodes at a time, twice, so that a large batch fits into little memory; by default all"""
    sync_bn: bool = False
    """batch normalization over the images of all processes instead of each process's own"""
    seed: int = 0
    """everything random follows from it"""


@dataclass(frozen=True)
class Model:
    encoder: Chosen[str] = None
    """narrow-resnet, torchvision/NAME, timm/NAME or just NAME; by default resnet50, without a GPU narrow-resnet"""
    stem: Literal["auto", "standard", "small"] = "auto"
    """first layers of a ResNet: small keeps the resolution; auto takes it for images up to 64 px"""
    head: Literal["mlp", "linear", "none"] = "mlp"
    """from feature to embedding: Linear-BN-ReLU-Linear, one Linear, or nothing"""
    dim: int = 128
    """length of an embedding (with --head none it is the feature's)"""


@dataclass(frozen=True)
class Classifier:
    temperature: float = 0.15
    """divides the cosines"""
    prior: Literal["random", "fixed-bn", "batch-bn", "running-bn"] = "batch-bn"
    """what the rows start as: random numbers, or features of the untrained network with BN in one of three modes"""
    row_norm: Chosen[float] = None
    """length of the first rows; by default as the prior gives them (random: as batch-bn would)"""
    row_lr: float = 1.0
    """learning rate of the rows as a multiple of the encoder's"""
    hardest: Chosen[int] = None
    """K: how many hardest classes share the smoothed label; by default the smaller of 100 and images / 100"""
    smoothing: float = 0.2
    """alpha: how much of the label they share; 0 turns it off"""
    classes_per_step: Chosen[int | Literal["full"]] = None
    """compare with this many sampled classes beside the batch's own (for the ablation); full, the default, is all"""
    storage: Storage = "float32"
    """how rows and their momentum are kept: bfloat16 takes half the memory, rounded at random, computed in float32"""

    @property
    def sampled(self) -> int | None:
        return None if self.classes_per_step == "full" else self.classes_per_step


@dataclass(frozen=True)
class Views:
    crop_min: float = 0.08
    """smallest area of a random crop, as a share of the image"""
    flip: float = 0.5
    """probability of a mirror image"""
    jitter: float = 1.0
    """strength of the color jitter; 1 is SimCLR's (.8 .8 .8 .2), 0 is none"""
    grayscale: float = 0.2
    """probability of losing all color"""
    blur: float = 0.5
    """probability of a Gaussian blur"""
    num_views: int = 2
    """random views of an image per step"""

    @property
    def augmentation(self) -> dict[str, float]:
        """How one view is made: all but their number."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "num_views"}


@dataclass(frozen=True)
class Images:
    image_size: Chosen[int] = None
    """side of a view in pixels; by default that of small images, else 224, or 64 without a GPU"""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """subtracted from the colors (0 to 1); travels with the encoder"""
    std: tuple[float, float, float] = IMAGENET_STD
    """divides the colors after that"""
    max_images: Chosen[int] = None
    """train on at most so many of the images, always the same ones; by default all"""
    labels: Literal["auto", "none"] = "auto"
    """auto: names of the first folders, or those of a named set; only ever used for scoring"""
    test_data: Chosen[str] = None
    """other labeled images that ask in the k-NN during training; by default the data's test split, or a fifth"""
    data_root: Chosen[Path] = None
    """where named sets are stored; by default ~/.cache/millionway/data, or $MILLIONWAY_DATA"""
    manifest: Chosen[Path] = None
    """a list made by `millionway index`, so that the images are not examined again"""
    max_unreadable: float = 0.01
    """stop if a larger share of the images cannot be read"""
    cache: bool = False
    """decode every image once, keep it with its shorter side at 8/7 of --image-size in ~/.cache/millionway/pixels (or
    $MILLIONWAY_PIXELS), and take views from that; for images that do not fit in memory"""
    duplicates: Duplicates = "report"
    """images with the same bytes. merge: one row for all; report: say how many; keep: say nothing"""


@dataclass(frozen=True)
class Running:
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to compute; auto takes a GPU if there is one"""
    threads: Chosen[int] = None
    """CPU threads of each process; by default the cores it may use, shared with other processes of the machine"""
    eval_every: Chosen[int] = None
    """epochs between evaluations; by default ten evaluations a run"""
    eval_images: int = 20_000
    """at most this many images are used for the k-NN bank and for the queries during training"""
    save_every: Chosen[int] = None
    """steps between checkpoints; by default an epoch"""
    keep: int = 2
    """how many of the newest checkpoints stay"""
    log_every: int = 10
    """steps between lines in metrics.jsonl"""
    timeout: float = 1800
    """seconds to wait for another process that does not answer"""


@dataclass(frozen=True)
class Pretrain:
    """Pretrain an encoder on the images of a folder, without labels."""

    data: str
    """a folder of images (flat or nested), a list of files (.txt, .csv, .parquet), tar shards, Parquet or Arrow with an
    image column, .npz or .npy, an address such as s3://..., or a named set such as digits or cifar10"""
    out: Path
    """the run folder to make"""
    preset: Chosen[str] = None
    """start from the settings of a preset; `millionway presets` lists them"""
    resume: bool = False
    """go on with the run in --out"""
    data_changed: bool = False
    """with --resume: images came, went or were renamed; who stayed keeps its row, who came gets one"""
    init_from: Chosen[Path] = None
    """take the encoder's first weights from an encoder.safetensors"""
    training: Training = field(default_factory=Training)
    model: Model = field(default_factory=Model)
    classifier: Classifier = field(default_factory=Classifier)
    views: Views = field(default_factory=Views)
    images: Images = field(default_factory=Images)
    running: Running = field(default_factory=Running)


PATHS = frozenset({"out", "init_from", "data_root", "manifest"})
GROUPS = ("training", "model", "classifier", "views", "images", "running")
# May differ when a run goes on: where things are and how they are done, not what is computed.
FREE_ON_RESUME = frozenset(
    ["data", "test_data", "out", "resume", "data_changed", "init_from", "data_root", "manifest", "max_unreadable"]
) | frozenset(["device", "threads", "eval_every", "eval_images", "save_every", "keep", "log_every", "timeout"])


def flat(config: Pretrain) -> dict[str, Any]:
    """All settings by name; names are unique over the groups."""
    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in GROUPS}
    for group in GROUPS:
        settings |= dataclasses.asdict(getattr(config, group))
    return settings


def with_settings(config: Pretrain, **settings: Any) -> Pretrain:
    """A copy with some settings changed, by their flat names."""
    known = flat(config)
    for name in settings:
        if name not in known:
            raise ValueError(f"no setting is called {name!r}. {suggest(name, known)}")
    for name in PATHS & settings.keys():
        settings[name] = None if settings[name] is None else Path(settings[name])
    # JSON has no tuples.
    settings |= {name: tuple(value) for name, value in settings.items() if isinstance(value, list)}
    groups = {}
    for group in GROUPS:
        names = {f.name for f in dataclasses.fields(getattr(config, group))} & set(settings)
        groups[group] = dataclasses.replace(getattr(config, group), **{name: settings[name] for name in names})
    own = {name: value for name, value in settings.items() if name in {f.name for f in dataclasses.fields(config)}}
    return dataclasses.replace(config, **groups, **own)


def to_json(config: Pretrain) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2, default=str) + "\n"


def from_json(text: str) -> Pretrain:
    """The inverse of `to_json`."""
    stored = json.loads(text)
    for group in GROUPS:
        stored |= stored.pop(group)
    empty = Pretrain(data="", out=Path())
    return with_settings(empty, **{name: value for name, value in stored.items() if name in flat(empty)})


def check(config: Pretrain) -> None:
    """Refuse values that can never be right, naming the setting, the value and the remedy."""
    values = flat(config)
    for group in GROUPS:
        for name, kind in get_type_hints(type(getattr(config, group))).items():
            if get_origin(kind) is Literal and values[name] not in get_args(kind):
                raise ValueError(f"{flag(name)} is one of {', '.join(get_args(kind))}, not {values[name]}")
            if not _fits(values[name], kind):
                raise ValueError(f"{flag(name)} cannot be {values[name]!r}")
    positive = "epochs batch_size lr dim temperature row_norm row_lr num_views image_size threads eval_every save_every"
    for name in [
        *positive.split(),
        "keep",
        "log_every",
        "eval_images",
        "micro_batch",
        "timeout",
        "max_images",
    ]:
        if values[name] is not None and not (values[name] > 0 and math.isfinite(values[name])):
            raise ValueError(f"{flag(name)} must be positive, not {values[name]}")
    for name in ("flip", "grayscale", "blur", "max_unreadable"):
        if not 0 <= values[name] <= 1:
            raise ValueError(f"{flag(name)} is a share from 0 to 1, not {values[name]}")
    for name in ("momentum", "smoothing"):
        if not 0 <= values[name] < 1:
            raise ValueError(f"{flag(name)} must be at least 0 and below 1, not {values[name]}")
    for name in ("weight_decay", "jitter", "warmup_epochs", "hardest"):
        if values[name] is not None and not values[name] >= 0:
            raise ValueError(f"{flag(name)} must not be negative, not {values[name]}")
    if not 0 < values["crop_min"] <= 1:
        raise ValueError(f"--crop-min is a share of the image above 0 and up to 1, not {values['crop_min']}")
    if values["image_size"] is not None and values["image_size"] < 8:
        raise ValueError(f"--image-size must be at least 8 pixels, not {values['image_size']}")
    if not all(math.isfinite(value) for value in values["mean"]):
        raise ValueError(f"--mean must be finite, not {values['mean']}")
    if not all(value > 0 and math.isfinite(value) for value in values["std"]):
        raise ValueError(f"--std must be positive, not {values['std']}")
    if values["micro_batch"] is not None and values["micro_batch"] * values["num_views"] < 2:
        raise ValueError("--micro-batch 1 with --num-views 1: batch normalization compares at least 2 views")
    if config.classifier.sampled is not None and config.classifier.sampled < 1:
        raise ValueError(f"--classes-per-step must be positive, not {config.classifier.sampled}")
    if config.classifier.sampled and values["smoothing"] and values["hardest"] != 0:
        raise ValueError("--classes-per-step samples classes, so the hardest ones may be missing; add --smoothing 0")


def _fits(value: Any, kind: Any) -> bool:
    """Whether it is of the type that a setting is declared with."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return value in parts
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_fits, value, parts))
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def default_lr(optimizer: str, batch_size: int) -> float:
    """The paper's for SGD, which grows with the batch. A step of Muon has the same length whatever the batch."""
    return 0.02 if optimizer == "muon" else 0.48 * batch_size / 4096


def resolve(
    config: Pretrain, num_images: int, image_side: int | None, has_gpu: bool, num_cores: int, num_ranks: int = 1
) -> Pretrain:
    """Fill in what depends on the data and the device. image_side: that of all images, if they are small and alike."""
    if num_images < 2:
        raise ValueError(f"--data {config.data}: {num_images} readable image; telling images apart needs at least 2")
    if config.training.batch_size == 1:
        raise ValueError("--batch-size must be at least 2: batch normalization compares the images of a step")
    training, size = config.training, config.images.image_size
    # At least eight steps per epoch, also for few images.
    batch_size = training.batch_size or min(512 if has_gpu else 256, max(2, num_images // 8))
    if training.batch_size is None:
        batch_size = max(2 * num_ranks, batch_size // num_ranks * num_ranks)
    if batch_size % num_ranks:
        near = [size for size in (batch_size // num_ranks * num_ranks, -(-batch_size // num_ranks) * num_ranks) if size]
        raise ValueError(
            f"--batch-size {batch_size} cannot be shared equally by {num_ranks} processes. "
            f"The nearest that can: {' and '.join(map(str, near))}."
        )
    if batch_size < 2 * num_ranks and not training.sync_bn:
        raise ValueError(
            f"--batch-size {batch_size} leaves one image to each of {num_ranks} processes, and batch normalization "
            f"compares several. Use at least {2 * num_ranks}, or --sync-bn."
        )
    if batch_size > num_images:
        raise ValueError(
            f"--batch-size {batch_size} is larger than the data: {num_images} readable images. "
            f"Use --batch-size {num_images} or less."
        )
    sampled = config.classifier.sampled
    if sampled and sampled + batch_size > num_images:
        raise ValueError(
            f"--classes-per-step {sampled}: with the batch's own {batch_size} they are more than there are, "
            f"{num_images}; use fewer, more images or a smaller --batch-size"
        )
    epochs = training.epochs
    warmup = training.warmup_epochs
    hardest = config.classifier.hardest
    if hardest is not None and hardest >= num_images:
        raise ValueError(f"--hardest {hardest} must be smaller than the number of images, {num_images}")
    if hardest is None:
        hardest = min(100, num_images // 100)
    return with_settings(
        config,
        batch_size=batch_size,
        lr=training.lr if training.lr is not None else default_lr(training.optimizer, batch_size),
        warmup_epochs=warmup if warmup is not None else 1 if epochs <= 10 else 3 if epochs < 100 else 10,
        encoder=config.model.encoder or ("torchvision/resnet50" if has_gpu else "narrow-resnet"),
        image_size=size or image_side or (224 if has_gpu else 64),
        hardest=hardest if config.classifier.smoothing and not sampled else 0,
        threads=config.running.threads or num_cores,
        eval_every=config.running.eval_every or max(1, math.ceil(epochs / 10)),
    )

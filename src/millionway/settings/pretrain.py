"""Every setting of a run. The text under a field is its help on the command line.

A field that may be None is chosen when the data and the device are known (`resolve`); what was chosen is logged and
stands in the run's config.json.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from millionway.settings.checks import (
    BelowOne,
    Chosen,
    Finite,
    NotNegative,
    Positive,
    Share,
    ShareAboveZero,
    at_least,
    check_fields,
    convert,
    suggest,
)

MAX_PIXELS, MAX_IMAGE_BYTES = 1 << 27, 1 << 29  # decoded, 512 MB either
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

NO_SHIFT_ABOVE = 0.05
"""temperature; below it exponentials of logits are shifted, so as not to overflow"""

Storage = Literal["float32", "bfloat16"]
Kernel = Literal["auto", "torch", "triton"]
Precision = Literal["float32", "tf32", "bfloat16"]
EncoderPrecision = Literal["float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda", "mps"]
Duplicates = Literal["report", "keep", "merge"]


@dataclass(frozen=True)
class Training:
    epochs: Positive[int] = 100
    """passes over all images, but for the last incomplete batch of each; more of them with --resume extend a finished
    run, whose learning rate rises again (--lr says how far)"""
    batch_size: Chosen[Positive[int]] = None
    """images per step over all processes; by default 64, 128 for many images (from 25,000 on), 256 for very many (from
    250,000 on), 512 with a GPU, and at most an eighth of the images"""
    optimizer: Chosen[Literal["sgd", "muon"]] = None
    """of encoder and head: by default Muon, which learns more per view, or SGD as in the paper for very many images
    without given weights (--init-from); rows take SGD with both"""
    lr: Chosen[Positive[float]] = None
    """peak learning rate; by default 0.03, 0.04 for many images, with sgd 0.06, for very many images the paper's 0.48 x
    batch / 4096; with --init-from a tenth of what it would be"""
    warmup_epochs: Chosen[NotNegative[int]] = None
    """linear warm-up; by default 10, or 3 below 100 epochs, or 1 up to 10 epochs; then cosine to 0"""
    extended_from: Chosen[str] = None
    """written by --resume --epochs MORE: where the learning rate had come to 0 before, as EPOCHS@LR,..."""
    frozen_epochs: Chosen[NotNegative[int]] = None
    """first epochs in which head and rows learn and the encoder rests; by default 0, or 1 with --init-from"""
    given_share: Chosen[Share] = None
    """how much of the weights of --init-from stays in encoder.safetensors, which is the mean of these and of those that
    were learned; by default 0.75 with --bn fixed, else 0"""
    encoder_lr: Chosen[Positive[float]] = None
    """learning rate of the encoder as a multiple of --lr; by default 1"""
    momentum: BelowOne = 0.9
    """of encoder, head and rows"""
    weight_decay: NotNegative[float] = 1e-4
    """of encoder, head and rows"""
    micro_batch: Chosen[Positive[int]] = None
    """images each process encodes at a time, twice, so that a large batch fits into little memory; by default all"""
    bn: Chosen[Literal["batch", "fixed"]] = None
    """what the encoder's batch normalization takes in training: statistics of each batch, or the fixed ones that it
    begins with; by default batch, or fixed with --init-from"""
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
    encoder_precision: Chosen[EncoderPrecision] = None
    """what encoder and head compute in while they learn, and the products of Muon; weights are float32; by default
    bfloat16 where the device has instructions for it; on CPUs for ResNets alone, from 16 px on (32 with the standard
    stem), and not with --sync-bn or --bn fixed"""
    head: Chosen[Literal["mlp", "linear", "none"]] = None
    """from feature to embedding: Linear-BN-ReLU-Linear, one Linear, or nothing; by default linear, or mlp for very many
    images"""
    dim: Chosen[Positive[int]] = None
    """length of an embedding (with --head none it is the feature's); by default 128, or 64 for many images"""


@dataclass(frozen=True)
class Classifier:
    temperature: Chosen[Positive[float]] = None
    """divides the cosines; by default 0.1, or 0.15 for very many images"""
    prior: Literal["random", "fixed-bn", "batch-bn", "running-bn"] = "batch-bn"
    """what the rows start as: random numbers, or features of the untrained network with BN in one of three modes"""
    row_norm: Chosen[Positive[float] | Literal["prior"]] = None
    """length of the first rows, or as the prior gives them (random: as batch-bn would); by default 1, or prior for very
    many images"""
    row_lr: Chosen[Positive[float]] = None
    """learning rate of the rows as a multiple of the encoder's; by default 40 x batch / 64, less by as much as --lr is
    higher for many images, a quarter with sgd, or 1 for very many images; with --init-from so much more as --lr is
    lower than usual"""
    hardest: Chosen[NotNegative[int]] = None
    """K: how many hardest classes share the smoothed label; by default the smaller of 100 and images / 100,
    or 0 where labels are not smoothed"""
    smoothing: Chosen[BelowOne] = None
    """alpha: how much of the label they share; 0 turns it off; by default 0, or 0.2 with --hardest or for very many
    images"""
    pairs: Chosen[NotNegative[float]] = None
    """weight of a second loss, in which two views of an image find each other among the views of the batch, as in
    SimCLR; 0 turns it off; by default 3, or 0 with one view or for very many images"""
    row_views: Chosen[Positive[int]] = None
    """how many of an image's views are told from all other images; the others only find each other; by default all,
    or one with --pairs"""
    classes_per_step: Chosen[Positive[int] | Literal["full"]] = None
    """compare with this many sampled classes beside the batch's own (for the ablation); full, the default, is all"""
    storage: Storage = "float32"
    """how rows and their momentum are kept: bfloat16 takes half the memory, rounded at random, computed in float32"""
    rows_in: str = "device"
    """where they are kept: device, host (its memory), or the path of a file, for more rows than memory holds"""
    kernel: Kernel = "auto"
    """who computes the passes over the rows on CUDA: the torch loop, fused Triton kernels, or whichever is faster"""
    precision: Chosen[Precision] = None
    """what the products of these passes compute in; tf32 is for CUDA; by default float32, or bfloat16 where the encoder
    learns in it on a CPU, but for very many images"""

    @property
    def sampled(self) -> int | None:
        return None if self.classes_per_step == "full" else self.classes_per_step


@dataclass(frozen=True)
class Augmentation:
    crop_min: ShareAboveZero = 0.08
    """smallest area of a random crop, as a share of the image"""
    flip: Share = 0.5
    """probability of a mirror image"""
    jitter: NotNegative[float] = 1.0
    """strength of the color jitter; 1 is SimCLR's (.8 .8 .8 .2), 0 is none"""
    grayscale: Share = 0.2
    """probability of losing all color"""
    blur: Share = 0.5
    """probability of a Gaussian blur"""
    views: Positive[int] = 2
    """random views of an image per step"""

    @property
    def of_a_view(self) -> dict[str, float]:
        """How one view is made: all but their number."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "views"}


@dataclass(frozen=True)
class Images:
    image_size: Chosen[Annotated[int, at_least(8, "pixels")]] = None
    """side of a view in pixels; by default that of small images, else 224, or 64 without a GPU"""
    first_size: Chosen[Annotated[int, at_least(8, "pixels")] | Literal["full"]] = None
    """the same in the first 70 % of the steps, where fine details are not needed yet and steps so take less time; full
    is --image-size; by default half of that from 64 px on for ResNets, else full, as for very many images and with
    --init-from"""
    mean: tuple[Finite, Finite, Finite] = IMAGENET_MEAN
    """subtracted from the colors (0 to 1); travels with the encoder"""
    std: tuple[Positive[float], Positive[float], Positive[float]] = IMAGENET_STD
    """divides the colors after that"""
    max_images: Chosen[Positive[int]] = None
    """train on at most so many of the images, always the same ones; by default all"""
    labels: Literal["auto", "none"] = "auto"
    """auto: names of the first folders, or those of a named set; only ever used for scoring"""
    test_data: Chosen[str] = None
    """other labeled images as queries of the k-NN during training; by default the data's test split, or a fifth"""
    data_root: Chosen[Path] = None
    """where named sets are stored; by default ~/.cache/millionway/data, or $MILLIONWAY_DATA"""
    manifest: Chosen[Path] = None
    """a list made by `millionway index`, so that the images are not examined again"""
    max_unreadable: Share = 0.01
    """stop if a larger share of the images cannot be read"""
    max_pixels: Positive[int] = MAX_PIXELS
    """an image of more pixels (width x height) is not decoded, but counted as unreadable"""
    max_image_bytes: Positive[int] = MAX_IMAGE_BYTES
    """a file of more bytes is not read, but counted as unreadable"""
    cache: bool = False
    """decode every image once, keep it with its shorter side at 8/7 of --image-size in ~/.cache/millionway/pixels (or
    $MILLIONWAY_PIXELS), and take views from that; for images that do not fit in memory"""
    duplicates: Duplicates = "report"
    """images with the same bytes. merge: one row for all; report: say how many; keep: say nothing"""


@dataclass(frozen=True)
class Running:
    device: Device = "auto"
    """where to compute; auto takes a GPU if there is one"""
    threads: Chosen[Positive[int]] = None
    """CPU threads of each process; by default the cores it may use, shared with other processes of the machine"""
    eval_every: Chosen[Positive[int]] = None
    """epochs between evaluations; by default ten evaluations a run"""
    knn_every: Chosen[Positive[int]] = None
    """epochs between evaluations that have k-NN with labels; the first and the last have it anyway. By default it is in
    every one where a new run is given --eval-every or may end early, else in so many that it takes a tenth of the time
    """
    eval_images: Positive[int] = 20_000
    """at most this many images are used for the k-NN bank and for the queries during training"""
    save_every: Chosen[Positive[int]] = None
    """steps between checkpoints; by default an epoch"""
    keep: Positive[int] = 2
    """how many of the newest checkpoints stay"""
    log_every: Positive[int] = 10
    """steps between lines in metrics.jsonl"""
    log_to: Chosen[Literal["wandb", "mlflow"]] = None
    """send the numbers of metrics.jsonl there too, if that package is installed"""
    guard: bool = True
    """with --init-from: when views find the other view of their image less often than they did with these weights, end
    the run and keep the better encoder"""
    stop_when_flat: bool = False
    """end the run when its verdict is that it no longer improves; views then have the full side from the start, if
    --first-size does not say otherwise"""
    verbose: bool = False
    """also say what goes on inside: settings that were chosen, where the time of a step goes, ..."""
    timeout: Positive[float] = 1800
    """seconds to wait for another process that does not answer"""

    def has_knn(self, epoch: int, epochs: int) -> bool:
        """The evaluation after this epoch, of so many, where there are labels: the next one where none is just then."""
        every, before = self.knn_every or 1, epoch - (self.eval_every or 1)
        return epoch in (0, epochs) or epoch // every > before // every


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
    """take the encoder's first weights from a file or folder: ours, or with --encoder NAME those of torchvision, timm,
    MoCo, DINO, lightly, ...; imagenet: what the encoder's own library offers for download"""
    training: Training = field(default_factory=Training)
    model: Model = field(default_factory=Model)
    classifier: Classifier = field(default_factory=Classifier)
    augmentation: Augmentation = field(default_factory=Augmentation)
    images: Images = field(default_factory=Images)
    running: Running = field(default_factory=Running)


GROUPS = {
    "training": Training,
    "model": Model,
    "classifier": Classifier,
    "augmentation": Augmentation,
    "images": Images,
}
GROUPS |= {"running": Running}
HINTS: dict[str, Any] = {
    name: hint
    for part in (Pretrain, *GROUPS.values())
    for name, hint in get_type_hints(part, include_extras=True).items()
    if name not in GROUPS
}
"""the type of every setting, by its flat name"""
# May differ when a run goes on: where things are and how they are done, not what is computed.
FREE_ON_RESUME = frozenset(
    {"data", "test_data", "out", "resume", "data_changed", "init_from", "data_root", "manifest", "max_unreadable"}
    | {"device", "threads", "rows_in", "save_every", "keep", "log_every", "timeout"}
    | {"eval_every", "knn_every", "eval_images", "guard", "log_to", "stop_when_flat", "verbose"}
)
FREE_ON_RESUME |= {"max_pixels", "max_image_bytes"}


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
    settings = {name: convert(value, HINTS[name]) for name, value in settings.items()}
    groups = {}
    for group in GROUPS:
        names = {f.name for f in dataclasses.fields(getattr(config, group))} & set(settings)
        groups[group] = dataclasses.replace(getattr(config, group), **{name: settings[name] for name in names})
    own = {name: value for name, value in settings.items() if name in {f.name for f in dataclasses.fields(config)}}
    return dataclasses.replace(config, **groups, **own)


def check(config: Pretrain) -> None:
    """Refuse values that can never be right, alone or together."""
    check_fields(config)
    if config.classifier.sampled and config.classifier.smoothing and config.classifier.hardest != 0:
        raise ValueError("--classes-per-step samples classes, so the hardest ones may be missing; add --smoothing 0")

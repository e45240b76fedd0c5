"""What follows from the data and the device where a setting is not given: the one rule for each."""

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from millionway.settings.pretrain import NO_SHIFT_ABOVE, Pretrain, with_settings

MANY_IMAGES, VERY_MANY_IMAGES = 25_000, 250_000
"""From so many on a run takes the values that were best with 50,000 images, and the paper's, which are for 1.28
million. Below it takes those that were best with 10,000 (docs/experiments.md). Each is about the middle of the two
beside it, as factors go; nothing was measured between 50,000 and the paper."""
BATCH_SIZE_WITH_GPU = 512
STEPS_PER_EPOCH = 8
"""at least so many, also for few images"""
KNN_SHARE = 0.1
"""of the time of a run, that k-NN along the way takes, about"""
FORWARD = 1 / 3
"""of what the encoder takes to learn from a view, to encode one"""
PAPER_LR, PAPER_BATCH_SIZE = 0.48, 4096
SMALL_LR, SMALL_LR_BATCHES = 0.06, (32, 256)  # as good with batches of 32, 64 and 256
ROW_RATE = {"sgd": 0.6 / 64, "muon": 1.2 / 64}
"""per image of a batch: the loss is a mean over it, so in a smaller one an image pulls its row harder"""
SMALL_IMAGE = 64  # up to this side the small stem is chosen
HALVED_FROM = 64
"""from this side on views have half of it at first: at 32 px nothing was gained (docs/experiments.md)"""
SMALLEST_IN_BFLOAT16 = {"small": 16, "standard": 32}
"""side of an image on a CPU, by the stem. Below it strided convolutions see a single pixel, and oneDNN's gradient of
their weights in bfloat16 then has numbers that nobody wrote (a test looks for them)."""
FAST_IN_BFLOAT16 = r"narrow-resnet|torchvision/(wide_)?resnet\d+.*|timm/(wide_)?resnet\d+.*"  # on CPUs
PLAIN_RESNETS = r"torchvision/(wide_)?resne[x]?t\d+.*|timm/resnet(18|34|50|101|152)"


@dataclass(frozen=True)
class Facts:
    """What the rules depend on."""

    num_images: int
    image_side: int | None = None
    """that of all images, if they are small and alike"""
    has_gpu: bool = False
    has_bfloat16: bool = False
    """whether the device has instructions for it"""
    has_test_images: bool = False
    """beside those that are learned from, to ask for their neighbors"""
    num_cores: int = 1
    num_ranks: int = 1


def num_hardest(num_images: int) -> int:
    """K of the smoothed labels."""
    return min(100, num_images // 100)


@dataclass(frozen=True)
class Scale:
    """What depends on the number of images alone."""

    batch_size: int
    optimizer: Literal["sgd", "muon"]
    pairs: float
    head: Literal["mlp", "linear"]
    dim: int
    temperature: float
    smoothing: float
    row_norm: float | Literal["prior"]
    muon_lr: float = 0.03


PAPER = Scale(256, "sgd", pairs=0.0, head="mlp", dim=128, temperature=0.15, smoothing=0.2, row_norm="prior")
SMALL = Scale(64, "muon", pairs=3.0, head="linear", dim=128, temperature=0.1, smoothing=0.0, row_norm=1.0)
MANY = replace(SMALL, batch_size=128, dim=64, muon_lr=0.04)
"""what the rows cost in a step grows with their number, so they are shorter, and there are fewer steps"""


def scale_of(num_images: int) -> Scale:
    return PAPER if num_images >= VERY_MANY_IMAGES else MANY if num_images >= MANY_IMAGES else SMALL


@dataclass(frozen=True)
class Start:
    """What depends on the encoder's first weights alone."""

    frozen_epochs: int
    rate: float
    """of encoder and head, as a multiple of what the number of images says; rows keep theirs"""
    encoder_lr: float
    bn: Literal["batch", "fixed"]
    optimizer: Literal["sgd", "muon"] | None = None
    """None: as the number of images says"""
    given_share: float = 0.0
    """with fixed statistics of BN; those of batches do not fit the mean of two networks"""


AT_RANDOM = Start(frozen_epochs=0, rate=1.0, encoder_lr=1.0, bn="batch")
GIVEN = Start(frozen_epochs=1, rate=0.1, encoder_lr=1.0, bn="fixed", optimizer="muon", given_share=0.75)
"""for --init-from (docs/method.md, given weights)"""


def start_of(config: Pretrain) -> Start:
    """A run that goes on has its own values; where there are none, it is of before there were others."""
    return GIVEN if config.init_from is not None and not config.resume else AT_RANDOM


def default_lr(scale: Scale, optimizer: str, batch_size: int) -> float:
    """For SGD it grows with the batch, in small runs only outside those that were tried. A step of Muon does not."""
    if optimizer == "muon":
        return scale.muon_lr
    if scale is PAPER:
        return PAPER_LR * batch_size / PAPER_BATCH_SIZE
    low, high = SMALL_LR_BATCHES
    return SMALL_LR * max(min(1.0, batch_size / low), batch_size / high)


def default_row_lr(scale: Scale, optimizer: str, batch_size: int) -> float:
    """As a multiple of the encoder's; rows take SGD with both."""
    if scale is PAPER:
        return 1.0
    return ROW_RATE[optimizer] * batch_size / (scale.muon_lr if optimizer == "muon" else SMALL_LR)


def default_knn_every(config: Pretrain, facts: Facts, eval_every: int) -> int:
    """A run that may end early has it at every evaluation, since any may be its last."""
    running = config.running
    if running.eval_every or running.stop_when_flat or config.init_from is not None:
        return eval_every
    encoded = min(facts.num_images, running.eval_images) * (2 if facts.has_test_images else 1)
    epochs = FORWARD * encoded / (KNN_SHARE * config.augmentation.views * facts.num_images)
    return eval_every * math.ceil(epochs / eval_every)


def num_warmup_epochs(epochs: int) -> int:
    return 1 if epochs <= 10 else 3 if epochs < 100 else 10


def is_plain_resnet(name: str) -> bool:
    return name == "narrow-resnet" or re.fullmatch(PLAIN_RESNETS, name) is not None


def choose_stem(name: str, stem: str, image_size: int) -> Literal["standard", "small"]:
    """What `auto` means: the small stem for images up to 64 px, where the encoder is a ResNet."""
    if stem == "auto":
        return "small" if image_size <= SMALL_IMAGE and is_plain_resnet(name) else "standard"
    assert stem in ("standard", "small")
    return stem


def resolve(config: Pretrain, facts: Facts) -> Pretrain:
    """Every setting has a value. Refused is what this data and device cannot do."""
    training, num_images = config.training, facts.num_images
    if num_images < 2:
        raise ValueError(f"--data {config.data}: {num_images} readable image; telling images apart needs at least 2")
    scale, batch_size = scale_of(num_images), _batch_size(config, facts)
    sampled, hardest = config.classifier.sampled, config.classifier.hardest
    if sampled and sampled + batch_size > num_images:
        raise ValueError(
            f"--classes-per-step {sampled}: with the batch's own {batch_size} they are more than there are, "
            f"{num_images}; use fewer, more images or a smaller --batch-size"
        )
    if hardest is not None and hardest >= num_images:
        raise ValueError(f"--hardest {hardest} must be smaller than the number of images, {num_images}")
    if hardest is None:
        hardest = num_hardest(num_images)
    views = config.augmentation.views
    if training.micro_batch is not None and training.micro_batch * views < 2:
        raise ValueError(f"--micro-batch 1 with --views {views}: batch normalization compares at least 2 views")
    pairs = config.classifier.pairs
    if pairs is None:
        pairs = scale.pairs if views > 1 else 0.0
    if pairs and views < 2:
        raise ValueError(f"--pairs {pairs:g} compares views of the same image, and --views is {views}; use --views 2")
    row_views = config.classifier.row_views or (1 if pairs else views)
    if row_views > views:
        raise ValueError(f"--row-views {row_views} is more than an image has, --views {views}")
    if row_views < views and not pairs:
        raise ValueError(f"--row-views {row_views} leaves views out that nothing learns from; use --views {row_views}")
    smoothing = config.classifier.smoothing
    if smoothing is None:  # who gives K wants it
        smoothing = 0.0 if sampled else PAPER.smoothing if config.classifier.hardest else scale.smoothing
    start = start_of(config)
    bn, given_share = training.bn or start.bn, training.given_share
    if given_share and config.init_from is None:
        raise ValueError(f"--given-share {given_share:g} is a share of given weights: it needs --init-from")
    if given_share is None:
        given_share = start.given_share if bn == "fixed" else 0.0
    warmup, optimizer = training.warmup_epochs, training.optimizer or start.optimizer or scale.optimizer
    usual_lr = default_lr(scale, optimizer, batch_size)
    lr = training.lr or start.rate * usual_lr
    row_lr = default_row_lr(scale, optimizer, batch_size)
    if start is GIVEN:  # the rows are new all the same
        row_lr *= usual_lr / lr
    encoder = config.model.encoder or ("torchvision/resnet50" if facts.has_gpu else "narrow-resnet")
    image_size = config.images.image_size or facts.image_side or (224 if facts.has_gpu else 64)
    first_size = config.images.first_size
    if first_size is None:
        gains = is_plain_resnet(encoder) and image_size >= HALVED_FROM and scale is not PAPER and start is AT_RANDOM
        gains = gains and not config.running.stop_when_flat  # nobody knows yet what the last steps will bring
        first_size = image_size // 2 if gains else "full"
    if first_size != "full" and first_size > image_size:
        raise ValueError(
            f"--first-size {first_size} is larger than --image-size {image_size}, which a run ends with; use at most "
            f"{image_size}, or full"
        )
    stem = choose_stem(encoder, config.model.stem, image_size)
    smallest, least = image_size if first_size == "full" else first_size, SMALLEST_IN_BFLOAT16[stem]
    has_room = facts.has_gpu or smallest >= least
    precision = config.model.encoder_precision
    if precision == "bfloat16" and not has_room:
        raise ValueError(
            f"--encoder-precision bfloat16 needs images of at least {least} px on a CPU, not {smallest}; use float32"
        )
    if precision is None:
        # On CPUs for ResNets alone: convolutions of single channels take twice as long in bfloat16 there. Nor where
        # numbers are not to depend on how many processes there are: BN over all of them, or with fixed statistics.
        gains = re.fullmatch(FAST_IN_BFLOAT16, encoder) is not None and not training.sync_bn and bn == "batch"
        precision = "bfloat16" if facts.has_bfloat16 and (facts.has_gpu or (gains and has_room)) else "float32"
    eval_every = config.running.eval_every or max(1, math.ceil(training.epochs / 10))
    temperature = config.classifier.temperature or scale.temperature
    has_narrow_rows = precision == "bfloat16" and facts.has_bfloat16 and not facts.has_gpu
    has_narrow_rows = has_narrow_rows and scale is not PAPER and temperature >= NO_SHIFT_ABOVE
    return with_settings(
        config,
        batch_size=batch_size,
        optimizer=optimizer,
        lr=lr,
        frozen_epochs=start.frozen_epochs if training.frozen_epochs is None else training.frozen_epochs,
        encoder_lr=training.encoder_lr or start.encoder_lr,
        bn=bn,
        given_share=given_share,
        warmup_epochs=warmup if warmup is not None else num_warmup_epochs(training.epochs),
        encoder=encoder,
        encoder_precision=precision,
        stem=stem,
        image_size=image_size,
        first_size=first_size,
        head=config.model.head or scale.head,
        dim=config.model.dim or scale.dim,
        temperature=temperature,
        row_norm=config.classifier.row_norm or scale.row_norm,
        row_lr=config.classifier.row_lr or row_lr,
        pairs=pairs,
        row_views=row_views,
        precision=config.classifier.precision or ("bfloat16" if has_narrow_rows else "float32"),
        smoothing=smoothing,
        hardest=hardest if smoothing and not sampled else 0,
        threads=config.running.threads or facts.num_cores,
        eval_every=eval_every,
        knn_every=config.running.knn_every or default_knn_every(config, facts, eval_every),
    )


def _batch_size(config: Pretrain, facts: Facts) -> int:
    given, num_ranks = config.training.batch_size, facts.num_ranks
    if given == 1:
        raise ValueError("--batch-size must be at least 2: batch normalization compares the images of a step")
    usual = BATCH_SIZE_WITH_GPU if facts.has_gpu else scale_of(facts.num_images).batch_size
    batch_size = given or min(usual, max(2, facts.num_images // STEPS_PER_EPOCH))
    if given is None:
        batch_size = max(2 * num_ranks, batch_size // num_ranks * num_ranks)
    if batch_size % num_ranks:
        near = [size for size in (batch_size // num_ranks * num_ranks, -(-batch_size // num_ranks) * num_ranks) if size]
        raise ValueError(
            f"--batch-size {batch_size} cannot be shared equally by {num_ranks} processes. "
            f"The nearest that can: {' and '.join(map(str, near))}."
        )
    if batch_size < 2 * num_ranks and not config.training.sync_bn:
        raise ValueError(
            f"--batch-size {batch_size} leaves one image to each of {num_ranks} processes, and batch normalization "
            f"compares several. Use at least {2 * num_ranks}, or --sync-bn."
        )
    if batch_size > facts.num_images:
        raise ValueError(
            f"--batch-size {batch_size} is larger than the data: {facts.num_images} readable images. "
            f"Use --batch-size {facts.num_images} or less."
        )
    return batch_size

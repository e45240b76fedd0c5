"""Whole runs as functions. A flag on the command line overrides the preset's value."""

import json
from collections.abc import Callable
from pathlib import Path

from millionway.settings.checks import suggest
from millionway.settings.pretrain import Pretrain, with_settings

PAPER = {"optimizer": "sgd", "head": "mlp", "temperature": 0.15, "smoothing": 0.2, "row_norm": "prior", "row_lr": 1.0}
PAPER |= {"views": 2, "pairs": 0.0, "dim": 128, "precision": "float32", "first_size": "full"}
"""whatever the number of images"""


def digits() -> Pretrain:
    """scikit-learn's 1,797 digits: the demo."""
    return with_settings(
        Pretrain(data="digits", out=Path("runs/digits")),
        encoder="narrow-resnet",
        image_size=16,
        epochs=30,
        batch_size=128,
        lr=0.06,
        prior="running-bn",
        **PAPER | {"row_norm": 1.0, "row_lr": 10.0},
        crop_min=0.5,
        flip=0.0,
        jitter=0.5,
        blur=0.0,
        mean=(0.305, 0.305, 0.305),
        std=(0.376, 0.376, 0.376),
        eval_every=5,
    )


CIFAR10 = {"image_size": 32, "stem": "small", "jitter": 0.5, "blur": 0.0}
CIFAR10 |= {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)}


def cifar10() -> Pretrain:
    """CIFAR-10: ResNet-18 with the small-image stem, and the paper's values."""
    return with_settings(
        Pretrain(data="cifar10", out=Path("runs/cifar10")),
        encoder="torchvision/resnet18",
        epochs=200,
        batch_size=512,
        lr=0.06,
        **PAPER,
        **CIFAR10,
    )


def cifar10_small() -> Pretrain:
    """CIFAR-10 without a GPU: the narrow ResNet, ten epochs, and what is chosen for as many images."""
    return with_settings(
        Pretrain(data="cifar10", out=Path("runs/cifar10-small")), encoder="narrow-resnet", epochs=10, **CIFAR10
    )


def fashion_mnist_small() -> Pretrain:
    """Fashion-MNIST without a GPU: the values of cifar10-small."""
    return with_settings(
        cifar10_small(),
        data="fashion-mnist",
        out=Path("runs/fashion-mnist-small"),
        image_size=28,
        mean=(0.286, 0.286, 0.286),
        std=(0.353, 0.353, 0.353),
    )


def imagenet1k() -> Pretrain:
    """ImageNet-1K with the paper's values: 200 epochs as in its ablations; --epochs 1000 is its headline."""
    return with_settings(
        Pretrain(data="imagenet/train", out=Path("runs/imagenet1k")),
        encoder="torchvision/resnet50",
        image_size=224,
        prior="running-bn",
        hardest=100,
        **PAPER,
        epochs=200,
        batch_size=4096,
        lr=0.48,
        warmup_epochs=10,
        momentum=0.9,
        weight_decay=1e-4,
    )


def imagenet21k() -> Pretrain:
    """ImageNet-21K, 14.2 million images, with the paper's values."""
    return with_settings(imagenet1k(), data="imagenet21k", out=Path("runs/imagenet21k"))


PRESETS: dict[str, Callable[[], Pretrain]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar10-small": cifar10_small,
    "fashion-mnist-small": fashion_mnist_small,
    "imagenet1k": imagenet1k,
    "imagenet21k": imagenet21k,
}


def preset(name: str) -> Pretrain:
    """The settings of a preset, by name."""
    if name not in PRESETS:
        raise ValueError(f"--preset {name}: no such preset. {suggest(name, PRESETS)}")
    return with_settings(PRESETS[name](), preset=name)


def measured(name: str) -> str:
    """What a run with the preset took and reached, from the file that benchmarks/presets.py writes."""
    results = json.loads((Path(__file__).parent / "measured.json").read_text(encoding="utf-8"))
    if name not in results:
        return "not measured"
    result = results[name]
    return (
        f"k-NN {result['knn_200_mean']:.1%} ± {result['knn_200_spread']:.1%} over {result['num_seeds']} seeds "
        f"(random encoder {result['random_knn_200_mean']:.1%}), {result['seconds_mean']:.0f} s on {result['hardware']}"
    )

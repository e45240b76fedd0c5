"""What can be set when an encoder is scored."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

import tyro

from millionway.settings.checks import Chosen, NotNegative, Positive, Share, ShareAboveZero
from millionway.settings.pretrain import MAX_IMAGE_BYTES, MAX_PIXELS, Device


@dataclass(frozen=True)
class Evaluate:
    """Score an encoder. health needs no labels, detect needs boxes, the others need a label for every image."""

    protocol: tyro.conf.Positional[str]
    """knn, linear, few-labels, finetune, retrieval, detect, health, or all that the data allows"""
    run: Chosen[Path] = None
    """the run folder, or an encoder.safetensors"""
    data: Chosen[str] = None
    """labeled images (names of the first folders are the labels); by default the run's own. detect: a folder in VOC
    layout, or a COCO .json beside its images"""
    _: KW_ONLY
    encoder: Chosen[str] = None
    """instead of a run: torchvision/NAME or timm/NAME"""
    weights: Chosen[str] = None
    """its weights: a file, random (the default), or supervised (the library's own download)"""
    image_size: Chosen[Positive[int]] = None
    """side of the images for such an encoder; by default 224"""
    test_data: Chosen[str] = None
    """the query images; by default the data's test split, or a held-out fifth of each class"""
    out: Chosen[Path] = None
    """folder for PROTOCOL.json; by default evaluation/ in the run folder"""
    data_root: Chosen[Path] = None
    """where named sets are stored"""
    max_unreadable: Chosen[Share] = None
    """stop if a larger share of the images cannot be read; by default 0.01, or the run's own"""
    max_pixels: Positive[int] = MAX_PIXELS
    """an image of more pixels (width x height) is not decoded, but counted as unreadable"""
    max_image_bytes: Positive[int] = MAX_IMAGE_BYTES
    """a file of more bytes is not read, but counted as unreadable"""
    seed: int = 0
    """of the held-out part, the subsets and the training of classifiers"""
    seeds: Positive[int] = 1
    """how many seeds, from --seed on: mean, spread and 95 % interval"""
    epochs: Chosen[Positive[int]] = None
    """of the training of a classifier; by default the protocol's"""
    batch_size: Chosen[Positive[int]] = None
    """of that training; by default the protocol's"""
    lr: Chosen[Positive[float]] = None
    """of that training (few-labels: of the classifier); by default the protocol's"""
    weight_decay: Chosen[NotNegative[float]] = None
    """of that training; by default the protocol's"""
    sweep: bool = False
    """linear: choose the learning rate on a held-out tenth of the training images"""
    augment: bool = False
    """linear: train on random crops, which encodes all images again in every epoch"""
    shares: tuple[ShareAboveZero, ...] = (0.01, 0.1)
    """few-labels: of the labels"""
    per_class: Chosen[Positive[int]] = None
    """few-labels: so many of each class instead of a share"""
    crop_min: ShareAboveZero = 0.08
    """smallest area of a random crop in training, as a share of the image"""
    flip: Share = 0.5
    """probability of a mirror image in training"""
    detector: Literal["c4", "fpn"] = "c4"
    """detect: Faster R-CNN as in MoCo's transfer, or with torchvision's feature pyramid"""
    detect_size: Positive[int] = 800
    """detect: shorter side of an image; training takes 0.6 to 1 of it"""
    iterations: Positive[int] = 24_000
    """detect: steps of training"""
    train_split: str = "trainval"
    """detect: list in ImageSets/Main to train on"""
    test_split: str = "test"
    """detect: list in ImageSets/Main to test on"""
    bad_boxes: Literal["error", "drop"] = "error"
    """detect: what to do with boxes outside their image or without area"""
    untrained: Literal["auto", "yes", "no"] = "auto"
    """whether an untrained encoder of the same kind, and the weights that the run began with, are scored too: by
    default where no encoder is trained for it (knn, linear, retrieval, health)"""
    cache: bool = True
    """whether features are kept for the next time"""
    device: Device = "auto"
    """where to compute"""
    threads: Chosen[Positive[int]] = None
    """CPU threads"""

    @property
    def crops(self) -> dict[str, float]:
        """How a view for training with labels is made: random resized crop and flip."""
        return {"crop_min": self.crop_min, "flip": self.flip, "jitter": 0.0, "grayscale": 0.0, "blur": 0.0}

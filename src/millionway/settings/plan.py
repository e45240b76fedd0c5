"""What can be set when a run is planned."""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from millionway.settings.checks import Chosen, NotNegative, Positive
from millionway.settings.pretrain import Storage
from millionway.settings.quantities import Quantity


@dataclass(frozen=True)
class Plan:
    """Say what a run would take of each device: memory, communication, the largest number of images."""

    instances: Quantity
    """number of images, for example 1281167 or 14.2M"""
    dim: Positive[int] = 128
    """length of an embedding"""
    batch_size: Positive[int] = 4096
    """images per step over all devices"""
    devices: Positive[int] = 1
    """processes that train together"""
    device_memory: Chosen[Quantity] = None
    """of each, for example 32GB; says whether it fits, and how many images would"""
    _: KW_ONLY
    encoder: str = "resnet50"
    """as for pretrain"""
    image_size: Positive[int] = 224
    """side of a view in pixels"""
    hardest: NotNegative[int] = 100
    """K of the smoothed labels, 0 without"""
    storage: Storage = "float32"
    """how rows and their momentum are kept"""
    views: Positive[int] = 2
    """of an image per step"""
    micro_batch: Chosen[Positive[int]] = None
    """images encoded at a time on each device"""
    device: Literal["cpu", "cuda"] = "cuda"
    """what kind of device"""
    calibrate: bool = False
    """measure the seconds of a step on the present device"""
    limits: bool = False
    """also say what bounds a step of the classifier on V100, A100 and H100, by their published peaks"""

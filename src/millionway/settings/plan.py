"""What can be set when a run is planned."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from millionway.settings.checks import Chosen, NotNegative, Positive
from millionway.settings.pretrain import Device, Storage
from millionway.settings.quantities import Quantity


@dataclass(frozen=True)
class Plan:
    """Say what a run would take. Of your images: memory, a batch that fits, hours on this machine, disk. Of a number of
    images: memory and communication of each device, and how many images would fit."""

    instances: Chosen[Quantity] = None
    """number of images, for example 1281167 or 14.2M; by default those of --data"""
    dim: Chosen[Positive[int]] = None
    """length of an embedding; by default pretrain's"""
    batch_size: Chosen[Positive[int]] = None
    """images per step over all devices; by default pretrain's"""
    devices: Positive[int] = 1
    """processes that train together"""
    device_memory: Chosen[Quantity] = None
    """of each, for example 32GB; says whether it fits, and how many images would; with --data by default this one's"""
    _: KW_ONLY
    data: Chosen[str] = None
    """images, as for pretrain: some of them are trained on for a few seconds, to say how long all of them take"""
    epochs: Positive[int] = 100
    """of that run"""
    encoder: Chosen[str] = None
    """as for pretrain, and with its default"""
    image_size: Chosen[Positive[int]] = None
    """side of a view in pixels; by default pretrain's"""
    first_size: Chosen[Positive[int] | Literal["full"]] = None
    """the same in the first 70 % of the steps; by default pretrain's"""
    hardest: Chosen[NotNegative[int]] = None
    """K of the smoothed labels, 0 without; by default pretrain's"""
    storage: Storage = "float32"
    """how rows and their momentum are kept"""
    views: Positive[int] = 2
    """of an image per step"""
    micro_batch: Chosen[Positive[int]] = None
    """images encoded at a time on each device"""
    device: Device = "auto"
    """what kind of device; auto is this machine's with --data, else cuda"""
    calibrate: bool = False
    """measure the seconds of a step on the present device"""
    limits: bool = False
    """also say what bounds a step of the classifier on V100, A100 and H100, by their published peaks"""
    data_root: Chosen[Path] = None
    """where named sets are stored"""
    threads: Chosen[Positive[int]] = None
    """CPU threads; by default the cores it may use"""
    verbose: bool = False
    """with --data: the table too"""

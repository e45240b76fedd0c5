"""What can be set when features are written."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from millionway.settings.checks import Chosen, Positive, Share
from millionway.settings.pretrain import MAX_IMAGE_BYTES, MAX_PIXELS, Device


@dataclass(frozen=True)
class Embed:
    """Write the features of all images of a folder."""

    run: Path
    """the run folder, or an encoder.safetensors"""
    data: str
    """a folder, a list of files or a named set"""
    out: Path
    """a name that ends in .parquet or .npy"""
    _: KW_ONLY
    data_root: Chosen[Path] = None
    """where named sets are stored"""
    max_unreadable: Share = 0.01
    """stop if a larger share of the images cannot be read"""
    max_pixels: Positive[int] = MAX_PIXELS
    """an image of more pixels (width x height) is not decoded, but counted as unreadable"""
    max_image_bytes: Positive[int] = MAX_IMAGE_BYTES
    """a file of more bytes is not read, but counted as unreadable"""
    device: Device = "auto"
    """where to compute"""
    threads: Chosen[Positive[int]] = None
    """CPU threads"""

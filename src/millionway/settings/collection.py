"""What can be set when images are looked at as the encoder sees them."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from millionway.settings.checks import Chosen, NotNegative, Positive, Share
from millionway.settings.pretrain import Device

Keep = Literal["largest", "oldest"]
VectorKind = Literal["features", "rows"]


@dataclass(frozen=True)
class Collected:
    """Images, and one vector for each: a run's, those of any encoder, or features that somebody has."""

    run: Chosen[Path] = None
    """the run folder, or an encoder.safetensors"""
    _: KW_ONLY
    encoder: Chosen[str] = None
    """instead of a run: torchvision/NAME or timm/NAME"""
    weights: Chosen[str] = None
    """its weights: a file, random (the default), or supervised (the library's own download)"""
    image_size: Chosen[Positive[int]] = None
    """side of the images for such an encoder; by default 224"""
    features: Chosen[Path] = None
    """instead of an encoder: a Parquet file with a column of vectors, and one of paths"""
    data: Chosen[str] = None
    """the images; by default the run's own, or those that --features names"""
    data_root: Chosen[Path] = None
    """where named sets are stored"""
    vectors: VectorKind = "features"
    """features of the encoder, one pass over all images; or a run's rows, which its checkpoint has already"""
    cache: bool = True
    """whether features are kept for the next time"""
    device: Device = "auto"
    """where to compute"""
    threads: Chosen[Positive[int]] = None
    """CPU threads"""


@dataclass(frozen=True)
class Search(Collected):
    """Find the images that are most like a picture."""

    query: tuple[str, ...] = ()
    """image files, or images of the collection by their id or path"""
    top: Positive[int] = 20
    """answers for each"""
    out: Chosen[Path] = None
    """a .csv or .parquet for all answers, or an .html that shows them"""


@dataclass(frozen=True)
class Duplicates(Collected):
    """Find groups of the same or nearly the same picture. Nothing is deleted."""

    threshold: Chosen[Share] = None
    """cosine from which two images are compared by their pixels; by default from the data's own nearest ones"""
    keep: Keep = "largest"
    """which of a group to keep"""
    against: Chosen[str] = None
    """other images, such as a test set: which of them are here too?"""
    out: Chosen[Path] = None
    """a .csv or .parquet for all groups, or an .html that shows the first ones"""
    write_list: Chosen[Path] = None
    """a .txt with every image that is alone or kept, for pretrain --data"""


@dataclass(frozen=True)
class Outliers(Collected):
    """Find the images that do not belong, with reasons."""

    top: Positive[int] = 100
    """how many, the strangest first"""
    out: Chosen[Path] = None
    """a .csv or .parquet for them, or an .html that shows them"""


@dataclass(frozen=True)
class Map(Collected):
    """Write place, cluster, neighbors, scores and thumbnail of every image as one Parquet file."""

    out: Chosen[Path] = None
    """the file; by default collection.parquet in the run folder"""


@dataclass(frozen=True)
class Explore(Collected):
    """Open a page to walk through the images: map, neighbors, search, duplicates, outliers, the run."""

    out: Chosen[Path] = None
    """the Parquet file of `map`, made if it is not there; by default collection.parquet in the run folder"""
    export: Chosen[Path] = None
    """write the page into this folder instead of serving it"""
    host: str = "127.0.0.1"
    """address to listen at; another one lets other machines in who have the token"""
    port: NotNegative[int] = 0
    """0 is a free one"""
    browser: bool = True
    """whether to open the page in a browser"""

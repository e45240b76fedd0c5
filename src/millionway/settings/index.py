"""What can be set when images are numbered."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from millionway.settings.checks import Chosen, Positive
from millionway.settings.pretrain import MAX_IMAGE_BYTES, MAX_PIXELS, Duplicates


@dataclass(frozen=True)
class Index:
    """Number the images of a folder, check that each can be read, and write the list.

    Again with the same --out: only what is new or has changed is read, and every image keeps its number.
    """

    data: Annotated[str, tyro.conf.Positional]
    """a folder, a list of files, shards, tables, arrays, an address or a named set"""
    out: Path
    """the list to make or to bring up to date, for example manifest.arrow"""
    _: KW_ONLY
    duplicates: Duplicates = "report"
    """images with the same bytes. merge: one row for all; report: say how many; keep: say nothing"""
    data_root: Chosen[Path] = None
    """where named sets are stored"""
    threads: Chosen[Positive[int]] = None
    """files read at the same time; by default one per core"""
    max_pixels: Positive[int] = MAX_PIXELS
    """an image of more pixels (width x height) is not decoded, but counted as unreadable"""
    max_image_bytes: Positive[int] = MAX_IMAGE_BYTES
    """a file of more bytes is not read, but counted as unreadable"""

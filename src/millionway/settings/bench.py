"""What can be set when the speed of images is measured."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from millionway.settings.checks import Chosen, Positive


@dataclass(frozen=True)
class Bench:
    """How fast are my images? Some are read and made into views, for a few seconds each."""

    what: Annotated[Literal["data"], tyro.conf.Positional]
    data: str
    """a folder, a list of files, shards, tables, arrays, an address or a named set"""
    _: KW_ONLY
    image_size: Chosen[Positive[int]] = None
    """side of a view in pixels; by default pretrain's, as is the number of views"""
    data_root: Chosen[Path] = None
    """where named sets are stored"""
    threads: Chosen[Positive[int]] = None
    """files read at the same time; by default one per core"""

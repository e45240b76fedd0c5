"""The processes that train together."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Rank and size. A group of one is the ordinary case and takes the same path."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def current() -> "Group":
        """The torchrun world if there is one, else a group of one."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size > 1:
            raise ValueError(f"WORLD_SIZE is {world_size}: several processes cannot train together yet; start one")
        return Group()

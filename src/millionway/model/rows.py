"""The rows as the passes over them need them: in blocks, with the inverse of their lengths."""

import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from millionway.machine import free_memory_bytes, num_local_ranks

log = logging.getLogger("millionway")

TINY_NORM = 1e-12
# Entries of one block of exponentials. On a CPU 2 MiB of float32 stay in the cache between the products; a GPU wants
# larger products. Fixed numbers, so that results do not depend on the memory that happens to be free.
BLOCK_ENTRIES = {"cpu": 1 << 19}
BLOCK_ENTRIES_ELSEWHERE = 1 << 25
# With a small batch the rows themselves are what has to stay in the cache (`benchmarks/blocks.py`).
BLOCK_ROWS = {"cpu": 1 << 11}
NUM_RUNS = 16  # of blocks, in a pass; each is worked through by one thread
NORM_ROWS_AT_ONCE = 1 << 16


def inverse_norms(rows: Float[Tensor, "n dim"]) -> Float[Tensor, "n 1"]:
    """1 / length, and 0 for vectors too short to have a direction."""
    return invert_lengths(torch.linalg.vector_norm(rows, dim=1, keepdim=True))


def invert_lengths(lengths: Tensor) -> Tensor:
    """1 / length, and 0 where it is below TINY_NORM; written into the tensor."""
    too_short = lengths < TINY_NORM
    return lengths.reciprocal_().masked_fill_(too_short, 0)


def unit(x: Float[Tensor, "n dim"]) -> tuple[Float[Tensor, "n dim"], Float[Tensor, "n 1"]]:
    """Vectors of length 1 (or 0) and the inverse lengths."""
    inverse = inverse_norms(x)
    return x * inverse, inverse


def rows_per_block(batch: int, device: torch.device) -> int:
    """A multiple of 64, by batch and device alone."""
    entries = BLOCK_ENTRIES.get(device.type, BLOCK_ENTRIES_ELSEWHERE)
    rows = max(256, entries // max(1, batch) // 64 * 64)
    return min(rows, BLOCK_ROWS.get(device.type, rows))


@dataclass(slots=True)
class Block:
    """Views of some of the rows."""

    number: int
    first_id: int
    weight: Tensor
    velocity: Tensor
    inverse_norm: Tensor
    dead: Tensor | None

    def __len__(self) -> int:
        return len(self.weight)

    def unit(self, out: Tensor) -> Tensor:
        """The rows at length 1 (or 0), in the dtype of the arithmetic, written into `out`."""
        return torch.mul(self.weight, self.inverse_norm, out=out[: len(self)])


@runtime_checkable
class Elsewhere(Protocol):
    """Where rows live, if not in memory of the device that computes (row_store.py)."""

    def stream(self, run: list[Block], first_id: int, writing: bool) -> Iterator[Block]: ...

    def gather(self, places: Tensor) -> Tensor: ...


@dataclass
class Rows:
    """The rows a pass runs over."""

    weight: Tensor
    """[classes, dim] as stored"""
    velocity: Tensor
    """[classes, dim] their momentum, as stored"""
    inverse_norm: Tensor
    """[classes, 1] in the dtype of the arithmetic"""
    block: int
    dead: Tensor | None = None
    """[classes] True for rows outside the softmax; None if there are none"""
    first_id: int = 0
    """class of the first row"""
    store: Elsewhere | None = None

    def __len__(self) -> int:
        return len(self.weight)

    @property
    def device(self) -> torch.device:
        """That computes."""
        return self.inverse_norm.device

    def blocks(self) -> list[Block]:
        """All rows, in order."""
        if len(self) == 0:
            return []
        # Cut once: slicing each tensor for each block takes as long as the arithmetic on short vectors.
        dead = itertools.repeat(None) if self.dead is None else self.dead.split(self.block)
        parts = zip(*(each.split(self.block) for each in (self.weight, self.velocity, self.inverse_norm)), dead)
        return [Block(number, self.first_id + number * self.block, *part) for number, part in enumerate(parts)]

    def runs(self) -> list[list[Block]]:
        """The blocks in runs, one thread for each; as many for any number of threads: no sum depends on that number."""
        blocks = self.blocks()
        size = -(-len(blocks) // NUM_RUNS)
        return [blocks[start : start + size] for start in range(0, len(blocks), max(1, size))]

    def stream(self, run: list[Block], writing: bool = False) -> Iterable[Block]:
        """The blocks in memory of the device. `writing`: weight and velocity are written back."""
        return run if self.store is None or not run else self.store.stream(run, self.first_id, writing)

    def gather(self, places: Int[Tensor, "*n"]) -> Float[Tensor, "*n dim"]:
        """These rows, as stored, in memory of the device."""
        if self.store is not None:
            rows = self.store.gather(places.flatten())
        else:
            rows = self.weight.index_select(0, places.flatten())  # a sixth of the time of weight[places]
        return rows.view(*places.shape, rows.shape[1])

    def room(self, dtype: torch.dtype) -> Tensor:
        """Memory as large as a block of rows."""
        return torch.empty(min(self.block, len(self)), self.weight.shape[1], dtype=dtype, device=self.device)


@dataclass
class InverseNorms:
    """The inverse lengths of the rows, remembered from step to step; computed again when the rows were written to."""

    values: Tensor | None = None
    version: int = -1
    """torch's counter of writes to the rows, as of `values`"""

    def of(
        self, weight: Tensor, dtype: torch.dtype, device: torch.device, store: Elsewhere | None
    ) -> Float[Tensor, "classes 1"]:
        if self.values is None or self.version != weight._version or self.values.device != device:
            self.values = torch.empty(len(weight), 1, dtype=dtype, device=device)
            rows = Rows(weight, weight, self.values, NORM_ROWS_AT_ONCE, store=store)
            for block in rows.stream(rows.blocks()):
                block.inverse_norm.copy_(inverse_norms(block.weight.to(dtype)))
            self.version = weight._version
        return self.values

    def follow(self, weight: Tensor) -> None:
        """An update has written rows and inverse lengths alike."""
        self.version = weight._version


@dataclass
class DeadRows:
    """Which rows are outside the softmax, remembered from step to step; asked again when `alive` was written to."""

    mask: Tensor | None = None
    alive: Tensor | None = None
    version: int = -1

    def of(self, alive: Tensor) -> Tensor | None:
        """None if there are none."""
        if self.alive is not alive or self.version != alive._version:
            self.mask = None if bool(alive.all()) else ~alive
            self.alive, self.version = alive, alive._version
        return self.mask


@dataclass
class KeptExponentials:
    """Memory for exponentials that pass 1 keeps for pass 2; where there is none they are computed again."""

    budget_bytes: int | None
    """None: `default_keep_bytes` when it is first asked for"""
    blocks: list[Tensor] = field(default_factory=list)

    def room(self, batch: int, rows: Rows, dtype: torch.dtype) -> list[Tensor]:
        """For as many of the first blocks as the budget allows; the same memory from step to step."""
        entries = batch * max(1, min(rows.block, len(rows)))  # a rank may own no rows
        block_bytes = entries * torch.finfo(dtype).bits // 8
        num_blocks = -(-len(rows) // rows.block)
        is_first = self.budget_bytes is None
        if self.budget_bytes is None:
            self.budget_bytes = default_keep_bytes(rows.device)
        num_kept = min(num_blocks, self.budget_bytes // block_bytes)
        if is_first:
            num_mb = num_kept * block_bytes >> 20
            log.debug("classifier: %d of %d blocks keep their exponentials, %d MB", num_kept, num_blocks, num_mb)
        is_other = any(block.numel() != entries or block.dtype != dtype for block in self.blocks[:1])
        if len(self.blocks) != num_kept or is_other:
            self.blocks = []  # let go of the old ones first
            self.blocks = [torch.empty(entries, dtype=dtype, device=rows.device) for _ in range(num_kept)]
        return self.blocks


def default_keep_bytes(device: torch.device) -> int:
    """A quarter of the free memory on a CPU, where keeping is faster (benchmarks/classifier.py); else nothing."""
    return free_memory_bytes() // (4 * num_local_ranks()) if device.type == "cpu" else 0

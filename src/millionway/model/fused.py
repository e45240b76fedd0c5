"""Starts the kernels: the passes of softmax.py on one CUDA device, in one launch each.

Programs share out the samples and, in the first pass, the rows in parts; the parts are added in order, so that the sums
do not depend on which program ends first. Parts and tiles follow from the sizes alone.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor
from triton import knobs

from millionway.model import kernels
from millionway.model.rows import Rows
from millionway.model.softmax import LOG2_E, FirstPass, Move

MAX_DIM = 256
STORAGE = (torch.float32, torch.bfloat16)
TENSOR_CORES = 8  # tf32 and bfloat16 products need a device of this generation
PROGRAMS = 1024  # of the first pass, if there is work for them: a few for each multiprocessor


@dataclass(frozen=True)
class Tiles:
    """What a program works on at a time. Found by compiling: the largest that need no memory besides registers."""

    samples: int
    rows: int
    warps: int
    stages: int

    def numbers(self) -> dict[str, int]:
        return {"BATCH_TILE": self.samples, "ROW_TILE": self.rows}

    def launch(self) -> dict[str, int | bool]:
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


def padded(dim: int) -> int:
    """A power of 2, and no less than a product takes."""
    return max(16, triton.next_power_of_2(dim))


def first_tiles(dim: int, products: str) -> Tiles:
    """of `sweep` and `largest`"""
    wide = padded(dim) > 128
    if products == "float32":
        return Tiles(32, 32, 8, 1) if wide else Tiles(32, 64, 8, 1)
    return Tiles(32, 32, 8, 2) if wide else Tiles(64, 64, 8, 2)


def second_tiles(dim: int, products: str) -> Tiles:
    """of `move`"""
    wide = padded(dim) > 128
    if products == "float32":
        has_gaps = padded(dim) != dim  # which take registers of their own
        return Tiles(16, 32, 8, 1) if wide else Tiles(32, 16, 8, 1) if has_gaps else Tiles(32, 32, 8, 1)
    return Tiles(32, 32, 8, 2) if wide else Tiles(64, 64, 8, 2)


def is_emulated() -> bool:
    """Whether kernels are interpreted, on a CPU (TRITON_INTERPRET=1)."""
    return bool(knobs.runtime.interpret)


@dataclass
class Pairs:
    """All entries [sample, target], sorted by class. Nothing of it is read by the host."""

    places: Int[Tensor, " pairs"]
    """in the flattened [batch, targets]"""
    samples: Int[Tensor, " pairs"]
    rows: Int[Tensor, " pairs"]
    """below 0 or beyond the last row: on another rank"""
    bounds: Int[Tensor, " tiles_and_1"]
    """pairs of the tiles of rows of the second pass"""
    unread: Int[Tensor, " none"]

    @staticmethod
    def build(targets: Int[Tensor, "batch targets"], num_rows: int, tile: int) -> "Pairs":
        rows, places = targets.flatten().sort(stable=True)
        edges = torch.arange(0, num_rows + tile, tile, device=targets.device).clamp(max=num_rows)
        return Pairs(places, places // targets.shape[1], rows, torch.searchsorted(rows, edges), places[:0])


@dataclass(frozen=True)
class FusedPasses:
    """products: float32, tf32 or bfloat16."""

    dim: int
    products: str = "float32"

    def kept_dtype(self, unit_x: Tensor, temperature: float) -> None:
        return None

    def pairs(self, targets: Int[Tensor, "batch targets"], rows: Rows) -> Pairs:
        """targets: as places among the rows, of which some may be elsewhere."""
        return Pairs.build(targets, len(rows), second_tiles(self.dim, self.products).rows)

    def largest_logits(
        self, unit_x: Float[Tensor, "batch dim"], rows: Rows, pairs: Pairs, temperature: float
    ) -> Float[Tensor, "2 batch"]:
        """As softmax.largest_logits; a number below all others stands where there are none."""
        batch, x = len(unit_x), _scaled(unit_x, temperature)
        at_targets = torch.empty_like(pairs.places, dtype=torch.float32)
        at_targets[pairs.places] = self._pair_logits(x, rows, pairs)
        tiles = first_tiles(self.dim, self.products)
        num_parts, rows_per_part = _parts(batch, len(rows), tiles)
        parts = x.new_full((num_parts, batch), kernels.LOWEST.value)
        grid = (triton.cdiv(batch, tiles.samples), num_parts)
        weights = rows.weight, rows.inverse_norm, _dead(rows)
        self._start(kernels.largest, grid, tiles, rows, x, *weights, parts, batch, len(rows), rows_per_part)
        return torch.stack([parts.amax(dim=0), at_targets.view(batch, -1).amax(dim=1)])

    def first_pass(
        self,
        unit_x: Float[Tensor, "batch dim"],
        rows: Rows,
        pairs: Pairs,
        temperature: float,
        shift: Float[Tensor, " batch"] | None,
        kept: list[Tensor],
    ) -> FirstPass:
        """As softmax.first_pass; no exponentials are kept."""
        batch, x = len(unit_x), _scaled(unit_x, temperature)
        tiles = first_tiles(self.dim, self.products)
        num_parts, rows_per_part = _parts(batch, len(rows), tiles)
        z, o = x.new_zeros(num_parts, batch), x.new_zeros(num_parts, batch, self.dim)
        grid = (triton.cdiv(batch, tiles.samples), num_parts)
        arguments = x, x if shift is None else shift, rows.weight, rows.inverse_norm, _dead(rows), z, o
        sizes = batch, len(rows), rows_per_part
        self._start(kernels.sweep, grid, tiles, rows, *arguments, *sizes, SHIFTED=shift is not None)
        return FirstPass(z.sum(dim=0), o.sum(dim=0), self._pair_logits(x, rows, pairs), shift, [])

    def second_pass(
        self,
        unit_x: Float[Tensor, "batch dim"],
        rows: Rows,
        pairs: Pairs,
        pair_q: Float[Tensor, " pairs"],
        first: FirstPass,
        z: Float[Tensor, " batch"],
        temperature: float,
        move: Move,
    ) -> None:
        """As softmax.second_pass."""
        batch, x = len(unit_x), _scaled(unit_x, temperature)
        tiles = second_tiles(self.dim, self.products)
        if len(rows) == 0:
            return
        back = 1 / (LOG2_E * batch)  # x carries log2(e) / tau; the gradient wants 1 / (tau B)
        shift = x if first.shift is None else first.shift
        of_rows = rows.weight, rows.velocity, rows.inverse_norm, _dead(rows)
        of_pairs = pairs.rows, pairs.samples, pair_q * back, pairs.bounds
        sizes = batch, len(rows), rows.first_id
        sgd = move.key, float(move.lr), float(move.momentum), float(move.weight_decay)
        arguments = (x, back / z, shift, *of_rows, *of_pairs, *sizes, *sgd)
        grid = (triton.cdiv(len(rows), tiles.rows),)
        self._start(kernels.move, grid, tiles, rows, *arguments, SHIFTED=first.shift is not None)

    def _pair_logits(self, x: Tensor, rows: Rows, pairs: Pairs) -> Float[Tensor, " pairs"]:
        """In powers of 2; -inf for rows on other ranks."""
        scores = x.new_empty(len(pairs.rows))
        start: Any = kernels.at_pairs[(triton.cdiv(len(scores), kernels.PAIR_TILE.value),)]
        of_pairs = pairs.rows, pairs.samples, scores, len(scores)
        with _on(x):
            start(x, rows.weight, rows.inverse_norm, *of_pairs, len(rows), **self._sizes(), enable_fp_fusion=True)
        return scores

    def _start(
        self, kernel: Any, grid: tuple[int, ...], tiles: Tiles, rows: Rows, *arguments: Tensor | float, **switches: bool
    ) -> None:
        with _on(rows.weight):
            kernel[grid](
                *arguments,
                **self._sizes(),
                **tiles.numbers(),
                **switches,
                MASKED=rows.dead is not None,
                EMULATED=is_emulated(),
                **tiles.launch(),
            )

    def _sizes(self) -> dict[str, int | str]:
        return {"DIM": self.dim, "PADDED": padded(self.dim), "PRODUCTS": self.products}


def _dead(rows: Rows) -> Tensor:
    """A kernel without dead rows does not read what it is given."""
    return rows.inverse_norm if rows.dead is None else rows.dead


def _scaled(unit_x: Tensor, temperature: float) -> Tensor:
    return (unit_x * (LOG2_E / temperature)).contiguous()


def _parts(batch: int, num_rows: int, tiles: Tiles) -> tuple[int, int]:
    """(into how many parts the rows are cut, rows of each: whole tiles)"""
    num_tiles = max(1, triton.cdiv(num_rows, tiles.rows))
    wanted = max(1, min(num_tiles, PROGRAMS // triton.cdiv(batch, tiles.samples)))
    per_part = math.ceil(num_tiles / wanted)
    return math.ceil(num_tiles / per_part), per_part * tiles.rows


def _on(x: Tensor) -> torch.cuda.device_of | nullcontext[None]:
    """Kernels start on the current device: make it this one's."""
    return torch.cuda.device_of(x) if x.is_cuda else nullcontext()

"""The two streaming passes over the rows; pure math on blocks, no communication.

It is flash attention with queries X^ and keys = values = W^ (hats: unit length). Nothing of size [batch, classes] or
[classes, dim] exists besides the rows and their momentum.

    pass 1   S = W^ X^^T / tau,  E = exp(S),  Z += E.sum,  O += E^T W^    the embedding gradient follows from Z and O
    pass 2   E again,  G = (E / Z - q) X^ / (tau B),  then row by row: Jacobian, weight decay, momentum, write

A block of E is [rows, batch]: so laid out, the three products are fastest, and a row's entries lie side by side.

q, the share of each target class, is sparse: (sample, class) pairs, sorted by class, so that a block takes one slice.

Cosines are bounded, so for tau >= 0.05 E needs no shift: exp(1 / 0.05) is far from overflow. Below that each sample is
shifted by its largest logit, which takes one more product to find.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from millionway import randomness
from millionway.model import threads

TINY_NORM = 1e-12
LOG2_E = 1 / math.log(2)  # goes into X^: 2^s is computed in half the time of e^s
NO_SHIFT_ABOVE = 0.05
# Entries of one block of exponentials. On a CPU 2 MiB of float32 stay in the cache between the products; a GPU wants
# larger products. Fixed numbers, so that results do not depend on the memory that happens to be free.
BLOCK_ENTRIES = {"cpu": 1 << 19}
BLOCK_ENTRIES_ELSEWHERE = 1 << 25
SHARES = 16  # of a pass; each is worked through by one worker


def inverse_norms(rows: Float[Tensor, "n dim"]) -> Float[Tensor, "n 1"]:
    """1 / length, and 0 for vectors too short to have a direction."""
    return _invert(torch.linalg.vector_norm(rows, dim=1, keepdim=True))


def _invert(lengths: Tensor) -> Tensor:
    """In place."""
    too_short = lengths < TINY_NORM
    return lengths.reciprocal_().masked_fill_(too_short, 0)


def unit(x: Float[Tensor, "n dim"]) -> tuple[Float[Tensor, "n dim"], Float[Tensor, "n 1"]]:
    """Vectors of length 1 (or 0) and the inverse lengths."""
    inverse = inverse_norms(x)
    return x * inverse, inverse


def rows_per_block(batch: int, device: torch.device) -> int:
    """A multiple of 64, by batch and device alone."""
    entries = BLOCK_ENTRIES.get(device.type, BLOCK_ENTRIES_ELSEWHERE)
    return max(256, entries // max(1, batch) // 64 * 64)


@dataclass
class Pairs:
    """The entries [sample, target] whose class lives here, sorted by class, so that each block takes one slice."""

    places: Int[Tensor, " pairs"]
    """in the flattened [batch, targets]"""
    samples: Int[Tensor, " pairs"]
    entries: Int[Tensor, " pairs"]
    """in the flattened [rows of the block, batch]"""
    bounds: list[int]
    """pairs of block b are bounds[b] : bounds[b + 1]"""

    @staticmethod
    def build(targets: Int[Tensor, "batch targets"], num_rows: int, block: int) -> "Pairs":
        """targets: as places among the rows, of which some may be elsewhere; for blocks of this many rows."""
        rows, places = targets.flatten().sort(stable=True)
        edges = torch.arange(0, num_rows + block, block, device=targets.device).clamp(max=num_rows)
        bounds = torch.searchsorted(rows, edges).tolist()  # the one host sync, before the loop
        here = slice(bounds[0], bounds[-1])
        places, rows = places[here], rows[here]
        samples = places // targets.shape[1]
        return Pairs(places, samples, rows % block * len(targets) + samples, [bound - bounds[0] for bound in bounds])

    def of_block(self, number: int) -> tuple[slice, Tensor]:
        here = slice(self.bounds[number], self.bounds[number + 1])
        return here, self.entries[here]


@dataclass
class Rows:
    """The rows a pass runs over, in blocks, as float arithmetic needs them."""

    weight: Tensor
    """[classes, dim] as stored"""
    inverse_norm: Tensor
    """[classes, 1] in the dtype of the arithmetic"""
    block: int
    dead: Tensor | None = None
    """[classes] True for rows outside the softmax; None if there are none"""
    first_id: int = 0
    """class of the first row"""

    def __len__(self) -> int:
        return len(self.weight)

    def blocks(self) -> list["Block"]:
        if len(self) == 0:
            return []
        # Cut once: slicing each tensor for each block takes as long as the arithmetic on short vectors.
        dead = itertools.repeat(None) if self.dead is None else self.dead.split(self.block)
        parts = zip(self.weight.split(self.block), self.inverse_norm.split(self.block), dead)
        return [Block(number, self.first_id + number * self.block, *part) for number, part in enumerate(parts)]

    def shares(self) -> list[list["Block"]]:
        """The blocks in runs, for workers; as many for any number of them, so that sums do not depend on it."""
        blocks = self.blocks()
        size = -(-len(blocks) // SHARES)
        return [blocks[start : start + size] for start in range(0, len(blocks), max(1, size))]

    def room(self, dtype: torch.dtype) -> Tensor:
        """Memory as large as a block of rows."""
        return self.weight.new_empty(min(self.block, len(self)), self.weight.shape[1], dtype=dtype)


@dataclass(slots=True)
class Block:
    """Views of some of the rows."""

    number: int
    first_id: int
    weight: Tensor
    inverse_norm: Tensor
    dead: Tensor | None

    def __len__(self) -> int:
        return len(self.weight)

    def unit(self, out: Tensor) -> Tensor:
        return torch.mul(self.weight, self.inverse_norm, out=out[: len(self)])


@dataclass(frozen=True)
class Move:
    """SGD on a block of rows: Jacobian of the normalization, weight decay, momentum, write."""

    lr: float
    momentum: float
    weight_decay: float
    key: int
    """for stochastic rounding, where rows are stored in bfloat16"""

    def __call__(self, block: Block, momentum: Tensor, gradient: Tensor, scratch: Tensor) -> None:
        """gradient: with respect to the unit rows. Leaves the new lengths in block.inverse_norm, not yet inverted.

        (I - w^ w^^T) g / |w|  =  g / |w| - w (w.g) / |w|^3
        """
        inverse = block.inverse_norm
        w, m = block.weight.to(gradient.dtype), momentum.to(gradient.dtype)  # the same memory where the dtypes agree
        along = torch.mul(w, gradient, out=scratch[: len(block)]).sum(dim=1, keepdim=True)
        back = along.mul_(inverse.pow(3)).neg_().add_(self.weight_decay)
        if block.dead is None:
            m.mul_(self.momentum).addcmul_(gradient, inverse).addcmul_(w, back)
            w.add_(m, alpha=-self.lr)
        else:  # dead rows: momentum times 1, and nothing else
            lives = (~block.dead[:, None]).to(w.dtype)
            m.mul_(1 + lives * (self.momentum - 1)).addcmul_(gradient, inverse * lives).addcmul_(w, back * lives)
            w.addcmul_(m, -self.lr * lives)
        if block.weight.dtype == torch.bfloat16:
            ids = torch.arange(block.first_id, block.first_id + len(block), device=w.device)
            _write_bfloat16(w, block.weight, self.key, ids)
            _write_bfloat16(m, momentum, self.key + 1, ids)
            w = block.weight.to(gradient.dtype)
        torch.linalg.vector_norm(w, dim=1, keepdim=True, out=inverse)


@dataclass
class FirstPass:
    """What pass 1 leaves for the loss, the embedding gradient and pass 2."""

    z: Float[Tensor, " batch"]
    """sum of the exponentials over the rows: exp(logit), or 2^(-shift) times that"""
    o: Float[Tensor, "batch dim"]
    """sum of the same times the unit row"""
    pair_logits: Float[Tensor, " pairs"]
    """in powers of 2"""
    shift: Float[Tensor, " batch"] | None
    """of the logits, in powers of 2"""
    kept: list[Tensor]
    """exponentials of the first blocks"""


def largest_logits(
    unit_x: Float[Tensor, "batch dim"], rows: Rows, pairs: Pairs, temperature: float
) -> Float[Tensor, "2 batch"]:
    """Of each sample, in powers of 2: over all rows that are alive, and over its targets. -inf where there are none."""
    x = unit_x * (LOG2_E / temperature)
    largest = x.new_full((2, len(x)), -torch.inf)
    unit_rows = rows.room(x.dtype)
    for block in rows.blocks():
        logits = block.unit(out=unit_rows) @ x.T
        here, entries = pairs.of_block(block.number)
        largest[1].scatter_reduce_(0, pairs.samples[here], logits.view(-1)[entries], "amax")
        if block.dead is not None:
            logits.masked_fill_(block.dead[:, None], -torch.inf)
        torch.maximum(largest[0], logits.amax(dim=0), out=largest[0])
    return largest


def first_pass(
    unit_x: Float[Tensor, "batch dim"],
    rows: Rows,
    pairs: Pairs,
    temperature: float,
    shift: Float[Tensor, " batch"] | None,
    kept: list[Tensor],
) -> FirstPass:
    """One sweep over the blocks. `kept`: room for the exponentials of the first len(kept) blocks.

    A kernel that computes output and log-sum-exp of attention can stand in for this function: o and z are its output
    times exp(lse), and exp(lse).
    """
    batch, dim = unit_x.shape
    x = unit_x * (LOG2_E / temperature)
    pair_logits = torch.empty(len(pairs.samples), dtype=x.dtype, device=x.device)

    def sums(blocks: list[Block]) -> tuple[Tensor, Tensor]:
        z, o = x.new_zeros(batch), x.new_zeros(batch, dim)
        scratch, unit_rows = x.new_empty(batch * len(blocks[0])), rows.room(x.dtype)
        for block in blocks:
            w = block.unit(out=unit_rows)
            e = _room(kept[block.number] if block.number < len(kept) else scratch, batch, block)
            here, entries = pairs.of_block(block.number)
            torch.mm(w, x.T, out=e)
            torch.index_select(e.view(-1), 0, entries, out=pair_logits[here])
            _exponentiate(e, shift, block.dead)
            z += e.sum(dim=0)
            o.addmm_(e.T, w)
        return z, o

    z, o = x.new_zeros(batch), x.new_zeros(batch, dim)
    for z_here, o_here in threads.on_each(sums, rows.shares(), x.device):
        z += z_here
        o += o_here
    return FirstPass(z, o, pair_logits, shift, kept)


def second_pass(
    unit_x: Float[Tensor, "batch dim"],
    rows: Rows,
    momentum: Tensor,
    pairs: Pairs,
    pair_shares: Float[Tensor, " pairs"],
    first: FirstPass,
    z: Float[Tensor, " batch"],
    temperature: float,
    move: Move,
) -> None:
    """Gradient, momentum and write, block by block. `z` is over all ranks' rows, `pair_shares` is q.

    d loss / d unit row = (E / Z - q) X^ / (tau B); 1 / (Z tau B) goes into X^, so that E is used as it is.
    """
    batch = len(unit_x)
    x = unit_x * (LOG2_E / temperature)
    scaled_x = unit_x / (z[:, None] * temperature * batch)
    subtract = pair_shares * z[pairs.samples]
    momentum_blocks = momentum.split(rows.block)

    def write(blocks: list[Block]) -> None:
        scratch = x.new_empty(batch * len(blocks[0]))
        unit_rows, gradient = rows.room(x.dtype), rows.room(x.dtype)
        for block in blocks:
            if block.number < len(first.kept):
                e = _room(first.kept[block.number], batch, block)
            else:
                e = _room(scratch, batch, block)
                torch.mm(block.unit(out=unit_rows), x.T, out=e)
                _exponentiate(e, first.shift, block.dead)
            here, entries = pairs.of_block(block.number)
            e.view(-1).index_add_(0, entries, subtract[here], alpha=-1)
            torch.mm(e, scaled_x, out=gradient[: len(block)])
            move(block, momentum_blocks[block.number], gradient[: len(block)], unit_rows)

    threads.on_each(write, rows.shares(), x.device)
    _invert(rows.inverse_norm)


def _room(memory: Tensor, batch: int, block: Block) -> Tensor:
    return memory[: batch * len(block)].view(len(block), batch)


def _exponentiate(e: Tensor, shift: Tensor | None, dead: Tensor | None) -> None:
    if shift is not None:
        e.sub_(shift)
    e.exp2_()
    if dead is not None:
        e.masked_fill_(dead[:, None], 0)


def _write_bfloat16(values: Float[Tensor, "n dim"], out: Tensor, key: int, ids: Int[Tensor, " n"]) -> None:
    """Round up or down with the probability that makes it right on average.

    bfloat16 is the upper half of a float32, so adding 16 random bits to the lower half and cutting it off does it. The
    bits are a function of (key, row, column). Plain rounding would lose every update below 2^-9 of the value.
    """
    per_row = randomness.bits(key, ids)[:, None]  # [n, 1] int32
    per_column = randomness.bits(key, torch.arange(values.shape[1], device=values.device))[None, :]
    noise = per_row ^ per_column
    noise.mul_(0x2C1B3C6D).bitwise_xor_(noise >> 12).mul_(0x297A2D39)
    noise = (noise >> 16).bitwise_and_(0xFFFF)
    out.copy_((values.view(torch.int32) + noise).bitwise_and_(-0x10000).view(torch.float32))

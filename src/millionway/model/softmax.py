"""The two streaming passes over the rows; pure math on blocks, no communication.

It is flash attention with queries X^ and keys = values = W^ (hats: unit length). Nothing of size [batch, classes] or
[classes, dim] exists besides the rows and their momentum.

    pass 1   S = X^ W^^T / tau,  E = exp(S),  Z += E.sum,  O += E W^      the embedding gradient follows from Z and O
    pass 2   E again,  G = (E / Z - q)^T X^ / (tau B),  then row by row: Jacobian, weight decay, momentum, write

q, the share of each target class, is sparse: (sample, class) pairs, sorted by class, so that a block takes one slice.

Cosines are bounded, so for tau >= 0.05 E needs no shift: exp(1 / 0.05) is far from overflow. Below that each sample is
shifted by its largest logit, which takes one more product to find.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from millionway import randomness

TINY_NORM = 1e-12
LOG2_E = 1 / math.log(2)  # goes into X^: 2^s is computed in half the time of e^s
NO_SHIFT_ABOVE = 0.05
# Entries of one block of exponentials. On a CPU 2 MiB of float32 stay in the cache between the products; a GPU wants
# larger products. Fixed numbers, so that results do not depend on the memory that happens to be free.
BLOCK_ENTRIES = {"cpu": 1 << 19}
BLOCK_ENTRIES_ELSEWHERE = 1 << 25


def inverse_norms(rows: Float[Tensor, "n dim"]) -> Float[Tensor, "n 1"]:
    """1 / length, and 0 for vectors too short to have a direction."""
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return norm.reciprocal().masked_fill_(norm < TINY_NORM, 0)


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
    """in the flattened [batch, rows of the block]"""
    bounds: list[int]
    """pairs of block b are bounds[b] : bounds[b + 1]"""

    @staticmethod
    def build(targets: Int[Tensor, "batch targets"], start: int, stop: int, block: int) -> "Pairs":
        """Those with start <= class < stop, for blocks of this many rows."""
        classes, places = targets.flatten().sort(stable=True)
        edges = torch.arange(start, stop + block, block, device=targets.device).clamp(max=stop)
        bounds = torch.searchsorted(classes, edges).tolist()  # the one host sync, before the loop
        here = slice(bounds[0], bounds[-1])
        places, classes = places[here], classes[here] - start
        samples = places // targets.shape[1]
        row = classes % block
        width = (stop - start - (classes - row)).clamp(max=block)  # the last block may be narrower
        return Pairs(places, samples, samples * width + row, [bound - bounds[0] for bound in bounds])

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

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """(number, start, stop)"""
        for number, start in enumerate(range(0, len(self), self.block)):
            yield number, start, min(start + self.block, len(self))

    def unit_block(self, start: int, stop: int, out: Tensor) -> Tensor:
        return torch.mul(self.weight[start:stop], self.inverse_norm[start:stop], out=out[: stop - start])


@dataclass(frozen=True)
class Move:
    """SGD on a block of rows: Jacobian of the normalization, weight decay, momentum, write."""

    lr: float
    momentum: float
    weight_decay: float
    key: int
    """for stochastic rounding, where rows are stored in bfloat16"""

    def __call__(self, rows: Rows, momentum: Tensor, gradient: Tensor, start: int, stop: int) -> None:
        """gradient: with respect to the unit rows start : stop.

        (I - w^ w^^T) g / |w|  =  g / |w| - w (w.g) / |w|^3
        """
        stored_w, stored_m, inverse = rows.weight[start:stop], momentum[start:stop], rows.inverse_norm[start:stop]
        w, m = stored_w.to(gradient.dtype), stored_m.to(gradient.dtype)  # the same memory where the dtypes agree
        along = torch.linalg.vecdot(w, gradient)[:, None]
        back = self.weight_decay - inverse**3 * along
        if rows.dead is None:
            m.mul_(self.momentum).addcmul_(gradient, inverse).addcmul_(w, back)
            w.add_(m, alpha=-self.lr)
        else:  # dead rows: momentum times 1, and nothing else
            lives = (~rows.dead[start:stop, None]).to(w.dtype)
            m.mul_(1 + lives * (self.momentum - 1)).addcmul_(gradient, inverse * lives).addcmul_(w, back * lives)
            w.addcmul_(m, -self.lr * lives)
        if stored_w.dtype == torch.bfloat16:
            ids = torch.arange(rows.first_id + start, rows.first_id + stop, device=w.device)
            _write_bfloat16(w, stored_w, self.key, ids)
            _write_bfloat16(m, stored_m, self.key + 1, ids)
            w = stored_w.to(gradient.dtype)
        inverse.copy_(inverse_norms(w))


@dataclass
class FirstPass:
    """What pass 1 leaves for the loss, the embedding gradient and pass 2."""

    z: Float[Tensor, " batch"]
    """sum of the exponentials over the rows: exp(logit), or 2^(-shift) times that"""
    o: Float[Tensor, "batch dim"]
    """sum of the same times the unit row"""
    pair_logits: Float[Tensor, " pairs"]
    shift: Float[Tensor, "batch 1"] | None
    """of the logits, in powers of 2"""
    kept: list[Tensor]
    """exponentials of the first blocks"""


def first_pass(
    unit_x: Float[Tensor, "batch dim"], rows: Rows, pairs: Pairs, temperature: float, kept: list[Tensor]
) -> FirstPass:
    """One sweep over the blocks. `kept`: room for the exponentials of the first len(kept) blocks.

    A kernel that computes output and log-sum-exp of attention can stand in for this function: o and z are its output
    times exp(lse), and exp(lse).
    """
    batch, dim = unit_x.shape
    x = unit_x * (LOG2_E / temperature)
    shift = _largest_logits(x, rows) if temperature < NO_SHIFT_ABOVE else None
    z = torch.zeros(batch, dtype=x.dtype, device=x.device)
    o = torch.zeros(batch, dim, dtype=x.dtype, device=x.device)
    pair_logits = torch.empty(len(pairs.samples), dtype=x.dtype, device=x.device)
    scratch, unit_rows = x.new_empty(batch * min(rows.block, len(rows))), x.new_empty(min(rows.block, len(rows)), dim)
    for number, start, stop in rows.blocks():
        w = rows.unit_block(start, stop, unit_rows)
        e = _room(kept[number] if number < len(kept) else scratch, batch, stop - start)
        here, entries = pairs.of_block(number)
        torch.mm(x, w.T, out=e)
        torch.index_select(e.view(-1), 0, entries, out=pair_logits[here])
        _exponentiate(e, shift, rows, start, stop)
        z += e.sum(dim=1)
        o.addmm_(e, w)
    return FirstPass(z, o, pair_logits / LOG2_E, shift, kept)


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

    d loss / d unit row = (E / Z - q)^T X^ / (tau B); 1 / (Z tau B) goes into X^, so that E is used as it is.
    """
    batch, dim = unit_x.shape
    x = unit_x * (LOG2_E / temperature)
    scaled_x = unit_x / (z[:, None] * temperature * batch)
    subtract = pair_shares * z[pairs.samples]
    largest = min(rows.block, len(rows))
    scratch, unit_rows, gradient = x.new_empty(batch * largest), x.new_empty(largest, dim), x.new_empty(largest, dim)
    for number, start, stop in rows.blocks():
        if number < len(first.kept):
            e = _room(first.kept[number], batch, stop - start)
        else:
            e = _room(scratch, batch, stop - start)
            torch.mm(x, rows.unit_block(start, stop, unit_rows).T, out=e)
            _exponentiate(e, first.shift, rows, start, stop)
        here, entries = pairs.of_block(number)
        e.view(-1).index_add_(0, entries, subtract[here], alpha=-1)
        move(rows, momentum, torch.mm(e.T, scaled_x, out=gradient[: stop - start]), start, stop)


def _room(memory: Tensor, batch: int, num_rows: int) -> Tensor:
    return memory[: batch * num_rows].view(batch, num_rows)


def _exponentiate(e: Tensor, shift: Tensor | None, rows: Rows, start: int, stop: int) -> None:
    if shift is not None:
        e.sub_(shift)
    e.exp2_()
    if rows.dead is not None:
        e.masked_fill_(rows.dead[start:stop], 0)


def _largest_logits(x: Tensor, rows: Rows) -> Tensor:
    """[batch, 1], over the rows that are alive."""
    largest = x.new_full((len(x), 1), -torch.inf)
    unit_rows = x.new_empty(min(rows.block, len(rows)), x.shape[1])
    for _, start, stop in rows.blocks():
        logits = x @ rows.unit_block(start, stop, unit_rows).T
        if rows.dead is not None:
            logits.masked_fill_(rows.dead[start:stop], -torch.inf)
        torch.maximum(largest, logits.amax(dim=1, keepdim=True), out=largest)
    return largest


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

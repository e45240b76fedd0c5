"""The two streaming passes over the rows; pure math on blocks, no communication.

It is flash attention with queries X^ and keys = values = W^ (hats: unit length). Nothing of size [batch, classes] or
[classes, dim] exists besides the rows and their momentum.

    pass 1   S = W^ X^^T / tau,  E = exp(S),  Z += E.sum,  O += E^T W^    the embedding gradient follows from Z and O
    pass 2   E again,  G = (E / Z - q) X^ / (tau B),  then row by row: Jacobian, weight decay, momentum, write

A block of E is [rows, batch]: so laid out, the three products are fastest, and a row's entries lie side by side.

q, the weight of each target class, is sparse: (sample, class) pairs, sorted by class, so that a block takes one slice.

Cosines are bounded, so for tau >= 0.05 E needs no shift: exp(1 / 0.05) is far from overflow. Below that each sample is
shifted by its largest logit, which takes one more product to find.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from millionway import randomness
from millionway.model import threads
from millionway.model.products import operand, operand_dtype, rounded
from millionway.model.rows import Block, Rows, invert_lengths
from millionway.settings.pretrain import NO_SHIFT_ABOVE, Precision

LOG2_E = 1 / math.log(2)  # goes into X^: 2^s is computed in half the time of e^s
TARGET_ROWS_AT_ONCE = 1 << 14  # rows of targets gathered at a time
NOISE_MIX = (0x2C1B3C6D, 0x297A2D39)
NOISE_ROWS_AT_ONCE = 1 << 16


@dataclass
class Pairs:
    """The entries [sample, target] whose class lives here, sorted by class, so that each block takes one slice.

    On a device that the host would have to wait for, those of other ranks are among them, and the slices are not known
    before pass 1 is over: `unread` is on the device until then.
    """

    places: Int[Tensor, " pairs"]
    """in the flattened [batch, targets]"""
    samples: Int[Tensor, " pairs"]
    rows: Int[Tensor, " pairs"]
    """places among the rows; others are on another rank"""
    entries: Int[Tensor, " pairs"]
    """in the flattened [rows of the block, batch]"""
    bounds: list[int]
    """pairs of block b are bounds[b] : bounds[b + 1]; empty as long as they are unread"""
    unread: Int[Tensor, " bounds"]

    @staticmethod
    def build(targets: Int[Tensor, "batch targets"], num_rows: int, block: int, waiting: bool | None = None) -> "Pairs":
        """targets: as places among the rows, of which some may be elsewhere; for blocks of this many rows.

        waiting: whether to read the bounds now. By default on a CPU, where nothing has to be waited for.
        """
        rows, places = targets.flatten().sort(stable=True)
        edges = torch.arange(0, num_rows + block, block, device=targets.device).clamp(max=num_rows)
        unread, bounds = torch.searchsorted(rows, edges), []
        if targets.device.type == "cpu" if waiting is None else waiting:
            bounds, unread = unread.tolist(), unread[:0]
            here = slice(bounds[0], bounds[-1])
            places, rows, bounds = places[here], rows[here], [bound - bounds[0] for bound in bounds]
        samples = places // targets.shape[1]
        return Pairs(places, samples, rows, rows % block * len(targets) + samples, bounds, unread)

    def of_block(self, number: int) -> tuple[slice, Tensor]:
        here = slice(self.bounds[number], self.bounds[number + 1])
        return here, self.entries[here]


class Noise:
    """Random bits for rows and momentum that are rounded at random, as [rows, 1] and [1, dim], which are mixed later.

    Those of many rows are drawn at a time: to draw is a dozen operations, however few the rows.
    """

    def __init__(self, key: int, dim: int, end: int, device: torch.device) -> None:
        """end: no row has this id or a later one."""
        self.keys, self.end = (key, key + 1), end
        columns = torch.arange(dim, device=device)
        self.per_column = [randomness.bits(each, columns)[None, :] for each in self.keys]
        self.per_row: list[Tensor] = []
        self.first = self.stop = 0
        """ids of the rows that are drawn for"""

    def of(self, block: Block) -> list[tuple[Int[Tensor, "rows 1"], Int[Tensor, "1 dim"]]]:
        """(of each row, of each column) for the rows and for their momentum."""
        first, stop = block.first_id, block.first_id + len(block)
        if not self.first <= first < stop <= self.stop:
            self.first, self.stop = first, max(stop, min(self.end, first + NOISE_ROWS_AT_ONCE))
            ids = torch.arange(self.first, self.stop, device=block.inverse_norm.device)
            self.per_row = [randomness.bits(key, ids)[:, None] for key in self.keys]
        here = slice(first - self.first, stop - self.first)
        return [(rows[here], columns) for rows, columns in zip(self.per_row, self.per_column)]


@dataclass(frozen=True)
class Room:
    """Memory for a block of rows, and for the next one after it: to ask for new memory takes as long as the work."""

    unit_rows: Tensor
    gradient: Tensor
    """with respect to the unit rows"""
    computed: tuple[Tensor, Tensor] | None
    """for rows and momentum in the dtype of the arithmetic, where they are stored in another"""
    noise: Noise | None
    """for the same case"""
    product: Tensor
    """the gradient as a product of narrow operands gives it; else the gradient"""

    @staticmethod
    def of(rows: Rows, run: list[Block], dtype: torch.dtype, operands: torch.dtype, key: int) -> "Room":
        computed, noise = None, None
        if rows.weight.dtype != dtype:
            computed = (rows.room(dtype), rows.room(dtype))
            noise = Noise(key, rows.weight.shape[1], run[-1].first_id + len(run[-1]), rows.device)
        gradient = rows.room(dtype)
        product = gradient if operands == dtype else rows.room(operands)
        return Room(rows.room(dtype), gradient, computed, noise, product)

    def rows_of(self, block: Block) -> tuple[Tensor, Tensor]:
        """(weight, velocity) to compute with: the stored ones themselves, or copies."""
        stored = (block.weight, block.velocity)
        if self.computed is None:
            return stored
        weight, velocity = (room[: len(block)].copy_(each) for room, each in zip(self.computed, stored))
        return weight, velocity


@dataclass(frozen=True)
class Move:
    """SGD on a block of rows: Jacobian of the normalization, weight decay, momentum, write."""

    lr: float
    momentum: float
    weight_decay: float
    key: int
    """for stochastic rounding, where rows are stored in bfloat16"""

    def __call__(self, block: Block, room: Room) -> None:
        """Leaves the new lengths in block.inverse_norm, not yet inverted, and nothing of use in the room.

        (I - w^ w^^T) g / |w|  =  g / |w| - w (w.g) / |w|^3
        """
        inverse, gradient, scratch = block.inverse_norm, room.gradient[: len(block)], room.unit_rows[: len(block)]
        w, v = room.rows_of(block)
        along = torch.mul(w, gradient, out=scratch).sum(dim=1, keepdim=True)
        back = along.mul_(inverse.pow(3)).neg_().add_(self.weight_decay)
        if block.dead is None:
            v.mul_(self.momentum).addcmul_(gradient, inverse).addcmul_(w, back)
            w.add_(v, alpha=-self.lr)
        else:  # dead rows: velocity times 1, and nothing else
            lives = (~block.dead[:, None]).to(w.dtype)
            v.mul_(1 + lives * (self.momentum - 1)).addcmul_(gradient, inverse * lives).addcmul_(w, back * lives)
            w.addcmul_(v, -self.lr * lives)
        if room.noise is not None:
            of_rows, of_momentum = room.noise.of(block)
            for values, out, bits in ((v, block.velocity, of_momentum), (w, block.weight, of_rows)):
                _write_bfloat16(values, out, *bits, scratch.view(torch.int32), gradient.view(torch.int32))
            w = scratch  # the rows as they are stored now
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
    unit_x: Float[Tensor, "batch dim"], rows: Rows, pairs: Pairs, temperature: float, precision: Precision = "float32"
) -> Float[Tensor, "2 batch"]:
    """Of each sample, in powers of 2: over all rows that are alive, and over its targets. -inf where there are none."""
    x = rounded(unit_x * (LOG2_E / temperature), precision)
    largest = x.new_full((2, len(x)), -torch.inf)
    unit_rows = rows.room(x.dtype)
    if not pairs.bounds:
        largest[1].scatter_reduce_(0, pairs.samples, _gathered_logits(x, rows, pairs, precision), "amax")
    for block in rows.stream(rows.blocks()):
        logits = rounded(block.unit(out=unit_rows), precision) @ x.T
        if pairs.bounds:
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
    precision: Precision = "float32",
) -> FirstPass:
    """One sweep over the blocks. `kept`: room for the exponentials of the first len(kept) blocks."""
    batch, dim = unit_x.shape
    dtype = exponentials_dtype(unit_x, temperature, precision)
    is_narrow, exact_x = dtype != unit_x.dtype, unit_x * (LOG2_E / temperature)
    x = operand(exact_x, precision, dtype)
    pair_logits = unit_x.new_empty(len(pairs.samples))
    if is_narrow:
        pair_logits = _gathered_logits(exact_x, rows, pairs, "float32")
    elif not pairs.bounds:
        pair_logits = _gathered_logits(x, rows, pairs, precision)

    def sums(blocks: list[Block]) -> tuple[Tensor, Tensor]:
        z, o = unit_x.new_zeros(batch), unit_x.new_zeros(batch, dim)
        scratch, unit_rows = x.new_empty(batch * len(blocks[0])), rows.room(dtype)
        for block in rows.stream(blocks):
            w = operand(block.unit(out=unit_rows), precision, dtype)
            e = _room(kept[block.number] if block.number < len(kept) else scratch, batch, block)
            torch.mm(w, x.T, out=e)
            if pairs.bounds and not is_narrow:
                here, entries = pairs.of_block(block.number)
                torch.index_select(e.view(-1), 0, entries, out=pair_logits[here])
            _exponentiate(e, shift, block.dead)
            if is_narrow:
                e.view(-1).index_fill_(0, pairs.of_block(block.number)[1], 0)  # they come in float32
                z += e.sum(dim=0, dtype=z.dtype)
                o += e.T @ w
            else:
                z += e.sum(dim=0)
                o.addmm_(rounded(e, precision).T, w)
        return z, o

    z, o = unit_x.new_zeros(batch), unit_x.new_zeros(batch, dim)
    for z_here, o_here in threads.on_each(sums, rows.runs(), x.device):
        z += z_here
        o += o_here
    if is_narrow and len(rows):
        added = _pair_exponentials(pair_logits, rows, pairs)
        z.index_add_(0, pairs.samples, added)
        parts = (each.split(TARGET_ROWS_AT_ONCE) for each in (pairs.rows, pairs.samples, added))
        for places, samples, some in zip(*parts):
            o.index_add_(0, samples, rows.gather(places) * (some[:, None] * rows.inverse_norm[places]))
    return FirstPass(z, o, pair_logits, shift, kept)


def second_pass(
    unit_x: Float[Tensor, "batch dim"],
    rows: Rows,
    pairs: Pairs,
    pair_q: Float[Tensor, " pairs"],
    first: FirstPass,
    z: Float[Tensor, " batch"],
    temperature: float,
    move: Move,
    precision: Precision = "float32",
) -> None:
    """Gradient, momentum and write, block by block. `z` is over all ranks' rows, `pair_q` is q of the pairs.

    d loss / d unit row = (E / Z - q) X^ / (tau B); 1 / (Z tau B) goes into X^, so that E is used as it is.
    """
    batch = len(unit_x)
    dtype = exponentials_dtype(unit_x, temperature, precision)
    is_narrow = dtype != unit_x.dtype
    x = operand(unit_x * (LOG2_E / temperature), precision, dtype)
    exact_x = unit_x / (z[:, None] * temperature * batch)
    scaled_x = operand(exact_x, precision, dtype)
    subtract = pair_q * z[pairs.samples]
    if is_narrow and len(rows):
        subtract -= _pair_exponentials(first.pair_logits, rows, pairs)

    def write(blocks: list[Block]) -> None:
        scratch = x.new_empty(batch * len(blocks[0]))
        room = Room.of(rows, blocks, unit_x.dtype, dtype, move.key)
        unit_rows = room.product if is_narrow else room.unit_rows
        for block in rows.stream(blocks, writing=True):
            if block.number < len(first.kept):
                e = _room(first.kept[block.number], batch, block)
            else:
                e = _room(scratch, batch, block)
                torch.mm(operand(block.unit(out=unit_rows), precision, dtype), x.T, out=e)
                _exponentiate(e, first.shift, block.dead)
            here, entries = pairs.of_block(block.number)
            gradient = room.gradient[: len(block)]
            if is_narrow:
                e.view(-1).index_fill_(0, entries, 0)
                gradient.copy_(torch.mm(e, scaled_x, out=room.product[: len(block)]))
                exact = exact_x[pairs.samples[here]].mul_(subtract[here, None])
                gradient.index_add_(0, entries // batch, exact, alpha=-1)
            else:
                e.view(-1).index_add_(0, entries, subtract[here], alpha=-1)
                torch.mm(rounded(e, precision), scaled_x, out=gradient)
            move(block, room)

    threads.on_each(write, rows.runs(), x.device)
    invert_lengths(rows.inverse_norm)


def weighted_rows(
    rows: Rows, targets: Int[Tensor, "batch targets"], q: Float[Tensor, "batch targets"]
) -> Float[Tensor, "batch dim"]:
    """sum over the targets (as places among the rows) of q times the unit row. q is 0 for targets on other ranks."""
    if len(rows) == 0:
        return q.new_zeros(len(q), rows.weight.shape[1])
    targets = targets.clamp(0, len(rows) - 1)
    weights = q * rows.inverse_norm[:, 0][targets]
    if rows.weight.dtype == q.dtype:
        weight = rows.weight
        if rows.store is not None:
            wanted, targets = targets.unique(return_inverse=True)
            weight = rows.gather(wanted)
        return F.embedding_bag(targets, weight, mode="sum", per_sample_weights=weights)
    samples_at_once = max(1, TARGET_ROWS_AT_ONCE // targets.shape[1])  # in the dtype of the arithmetic
    parts = zip(targets.split(samples_at_once), weights.split(samples_at_once))
    return torch.cat([torch.bmm(some[:, None, :], rows.gather(places).to(q.dtype))[:, 0] for places, some in parts])


def _gathered_logits(x: Tensor, rows: Rows, pairs: Pairs, precision: Precision) -> Float[Tensor, " pairs"]:
    """Of the pairs, apart from the blocks: their rows are gathered. -inf for those on other ranks."""
    if len(rows) == 0:
        return x.new_full((len(pairs.rows),), -torch.inf)
    here = (pairs.rows >= 0) & (pairs.rows < len(rows))
    parts = zip(pairs.rows.clamp(0, len(rows) - 1).split(TARGET_ROWS_AT_ONCE), pairs.samples.split(TARGET_ROWS_AT_ONCE))
    logits = [
        (rounded(rows.gather(places) * rows.inverse_norm[places], precision) * x[samples]).sum(dim=1)
        for places, samples in parts
    ]
    return torch.cat(logits).masked_fill_(~here, -torch.inf)


def _pair_exponentials(logits: Tensor, rows: Rows, pairs: Pairs) -> Float[Tensor, " pairs"]:
    """In float32, where the others are not: an own row has most of what there is when training ends, p - q is then a
    small difference, and so is the gradient."""
    e = logits.exp2()
    return e if rows.dead is None else e.masked_fill_(rows.dead[pairs.rows], 0)


def exponentials_dtype(unit_x: Tensor, temperature: float, precision: Precision) -> torch.dtype:
    """That of the operands of products. Large logits, which need a shift, would lose too much in another."""
    return unit_x.dtype if temperature < NO_SHIFT_ABOVE else operand_dtype(precision, unit_x)


def _room(memory: Tensor, batch: int, block: Block) -> Tensor:
    """As much of the memory as the block's exponentials need, [rows of the block, batch]."""
    return memory[: batch * len(block)].view(len(block), batch)


def _exponentiate(e: Tensor, shift: Tensor | None, dead: Tensor | None) -> None:
    """Logits become 2^(logit - shift), written into e; 0 for dead rows."""
    if shift is not None:
        e.sub_(shift)
    e.exp2_()
    if dead is not None:
        e.masked_fill_(dead[:, None], 0)


def _write_bfloat16(
    values: Float[Tensor, "n dim"],
    out: Tensor,
    per_row: Int[Tensor, "n 1"],
    per_column: Int[Tensor, "1 dim"],
    noise: Int[Tensor, "n dim"],
    shifted: Int[Tensor, "n dim"],
) -> None:
    """Write float32 values as bfloat16, rounded up or down with the probability that makes it right on average.

    bfloat16 is the upper half of a float32, so adding 16 random bits to the lower half and cutting it off does it. The
    bits are a function of (key, row, column). Plain rounding would lose every update below 2^-9 of the value.
    noise, shifted: memory; the first holds the bits of the rounded values afterwards.
    """
    torch.bitwise_xor(per_row, per_column, out=noise).mul_(NOISE_MIX[0])
    torch.bitwise_right_shift(noise, 12, out=shifted)
    noise.bitwise_xor_(shifted).mul_(NOISE_MIX[1]).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    out.copy_(noise.add_(values.view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32))

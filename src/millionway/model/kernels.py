"""The two passes of softmax.py as kernels for CUDA (Triton): exponentials never leave the chip. fused.py starts them.

    sweep      pass 1 in one launch: scores, exponentials, Z and O; flash attention with keys = values = rows
    move       pass 2 in one launch: scores again, gradient, Jacobian, weight decay, momentum, rounding, write
    largest    the largest score of each sample, for temperatures that need a shift
    at_pairs   the scores of the (sample, target) pairs alone

Rows enter the products as they are stored; their inverse lengths multiply the scores. Products are computed in float32,
tf32 or bfloat16 (PRODUCTS), sums in float32. x is the unit embeddings times log2(e) / tau everywhere, [batch, DIM].
Tiles of vectors are PADDED wide, a power of 2; what is beyond DIM is 0. Numbers of rows are 32 bits, offsets 64.
"""

# Triton takes more than its annotations say.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from millionway import randomness
from millionway.model.rows import TINY_NORM
from millionway.model.softmax import NOISE_MIX

LOWEST = tl.constexpr(-1e30)  # stands for "no row": -inf - -inf would be NaN
PAIR_TILE = tl.constexpr(16)
TINY = tl.constexpr(TINY_NORM)
GOLDEN, MIX_1, MIX_2 = (tl.constexpr(number) for number in randomness.SPLITMIX)
# Change from step to step or run to run: one kernel serves all.
SIZES = ["batch", "num_rows", "num_pairs", "rows_per_part", "first_id", "key", "lr", "momentum", "weight_decay"]
NOISE_1, NOISE_2 = (tl.constexpr(number) for number in NOISE_MIX)


@triton.jit
def _nearest(x, BITS: tl.constexpr):
    """float32 without its lower bits, rounded to the nearest."""
    return ((x.to(tl.int32, bitcast=True) + (1 << (BITS - 1))) & -(1 << BITS)).to(tl.float32, bitcast=True)


@triton.jit
def _operand(x, PRODUCTS: tl.constexpr, EMULATED: tl.constexpr):
    """As it enters a product. EMULATED: rounded as tensor cores read it, but float32: all the interpreter has."""
    if PRODUCTS == "bfloat16" and not EMULATED:
        x = x.to(tl.bfloat16)
    else:
        x = x.to(tl.float32)
        if PRODUCTS == "bfloat16":
            x = _nearest(x, 16)
        elif PRODUCTS == "tf32" and EMULATED:
            x = _nearest(x, 13)
    return x


@triton.jit
def _product(a, b, sums, PRODUCTS: tl.constexpr, EMULATED: tl.constexpr):
    precision: tl.constexpr = "tf32" if PRODUCTS == "tf32" and not EMULATED else "ieee"
    return tl.dot(a, b, sums, input_precision=precision)


@triton.jit
def _places(numbers, DIM: tl.constexpr, PADDED: tl.constexpr):
    """[numbers, PADDED] offsets of vectors."""
    return numbers.to(tl.int64)[:, None] * DIM + tl.arange(0, PADDED)[None, :]


@triton.jit
def _inside(chosen, DIM: tl.constexpr, PADDED: tl.constexpr):
    """[chosen, PADDED]: neither another vector nor padding."""
    inside = tl.broadcast_to(chosen[:, None], [chosen.shape[0], PADDED])
    if DIM != PADDED:
        inside = inside & (tl.arange(0, PADDED) < DIM)[None, :]
    return inside


@triton.jit
def _counts(dead_pointer, rows, last, MASKED: tl.constexpr):
    """Rows that are in the softmax."""
    counts = rows < last
    if MASKED:
        counts = counts & (tl.load(dead_pointer + rows, mask=counts, other=1) == 0)
    return counts


@triton.jit
def _load_tile(pointer, numbers, limit, DIM: tl.constexpr, PADDED: tl.constexpr):
    """[numbers, PADDED] of a [limit, DIM] tensor; 0 beyond it."""
    return tl.load(pointer + _places(numbers, DIM, PADDED), mask=_inside(numbers < limit, DIM, PADDED), other=0.0)


@triton.jit(do_not_specialize=SIZES)
def sweep(
    x_pointer,  # [batch, DIM] unit embeddings times log2(e) / tau
    shift_pointer,  # [batch]
    weight_pointer,  # [num_rows, DIM] as stored
    inverse_pointer,  # [num_rows] inverse lengths
    dead_pointer,  # [num_rows] rows outside the softmax; read if MASKED
    z_pointer,  # [parts, batch]
    o_pointer,  # [parts, batch, DIM]
    batch,
    num_rows,
    rows_per_part,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BATCH_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    MASKED: tl.constexpr,
    SHIFTED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    EMULATED: tl.constexpr,
):
    samples = tl.program_id(0) * BATCH_TILE + tl.arange(0, BATCH_TILE)
    part = tl.program_id(1)
    x = _operand(_load_tile(x_pointer, samples, batch, DIM, PADDED), PRODUCTS, EMULATED)
    if SHIFTED:
        shift = tl.load(shift_pointer + samples, mask=samples < batch, other=0.0)[:, None]
    z = tl.zeros([BATCH_TILE], tl.float32)
    o = tl.zeros([BATCH_TILE, PADDED], tl.float32)
    first = part * rows_per_part
    last = tl.minimum(first + rows_per_part, num_rows)
    for start in range(first, last, ROW_TILE):
        rows = start + tl.arange(0, ROW_TILE)
        w = _operand(_load_tile(weight_pointer, rows, last, DIM, PADDED), PRODUCTS, EMULATED)
        inverse = tl.load(inverse_pointer + rows, mask=rows < last, other=0.0)[None, :]
        counts = _counts(dead_pointer, rows, last, MASKED)[None, :]
        scores = _product(x, tl.trans(w), tl.zeros([BATCH_TILE, ROW_TILE], tl.float32), PRODUCTS, EMULATED) * inverse
        if SHIFTED:
            scores -= shift
        e = tl.where(counts, tl.exp2(scores), 0.0)
        z += tl.sum(e, axis=1)
        o = _product(_operand(e * inverse, PRODUCTS, EMULATED), w, o, PRODUCTS, EMULATED)
    place = part.to(tl.int64) * batch + samples
    tl.store(z_pointer + place, z, mask=samples < batch)
    tl.store(o_pointer + _places(place, DIM, PADDED), o, mask=_inside(samples < batch, DIM, PADDED))


@triton.jit(do_not_specialize=SIZES)
def largest(
    x_pointer,
    weight_pointer,
    inverse_pointer,
    dead_pointer,
    largest_pointer,  # [parts, batch]
    batch,
    num_rows,
    rows_per_part,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BATCH_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    MASKED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    EMULATED: tl.constexpr,
):
    samples = tl.program_id(0) * BATCH_TILE + tl.arange(0, BATCH_TILE)
    part = tl.program_id(1)
    x = _operand(_load_tile(x_pointer, samples, batch, DIM, PADDED), PRODUCTS, EMULATED)
    highest = tl.full([BATCH_TILE], LOWEST, tl.float32)
    first = part * rows_per_part
    last = tl.minimum(first + rows_per_part, num_rows)
    for start in range(first, last, ROW_TILE):
        rows = start + tl.arange(0, ROW_TILE)
        w = _operand(_load_tile(weight_pointer, rows, last, DIM, PADDED), PRODUCTS, EMULATED)
        inverse = tl.load(inverse_pointer + rows, mask=rows < last, other=0.0)[None, :]
        counts = _counts(dead_pointer, rows, last, MASKED)[None, :]
        scores = _product(x, tl.trans(w), tl.zeros([BATCH_TILE, ROW_TILE], tl.float32), PRODUCTS, EMULATED) * inverse
        highest = tl.maximum(highest, tl.max(tl.where(counts, scores, LOWEST), axis=1))
    tl.store(largest_pointer + part.to(tl.int64) * batch + samples, highest, mask=samples < batch)


@triton.jit(do_not_specialize=SIZES)
def at_pairs(
    x_pointer,
    weight_pointer,
    inverse_pointer,
    pair_rows_pointer,  # [num_pairs] places among the rows; others are elsewhere
    pair_samples_pointer,
    scores_pointer,  # [num_pairs] -inf where the row is elsewhere
    num_pairs,
    num_rows,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    pairs = tl.program_id(0) * PAIR_TILE + tl.arange(0, PAIR_TILE)
    rows = tl.load(pair_rows_pointer + pairs, mask=pairs < num_pairs, other=-1)
    samples = tl.load(pair_samples_pointer + pairs, mask=pairs < num_pairs, other=0)
    here = (rows >= 0) & (rows < num_rows)
    rows = tl.where(here, rows, num_rows)  # which is beyond the last, so nothing is read
    # Rounded as in the large products, so that a target's score is the same in numerator and denominator.
    w = _operand(_load_tile(weight_pointer, rows, num_rows, DIM, PADDED), PRODUCTS, True)
    x = _operand(_load_tile(x_pointer, samples, 1 << 62, DIM, PADDED), PRODUCTS, True)
    inverse = tl.load(inverse_pointer + rows, mask=here, other=0.0)
    scores = tl.sum(w * x, axis=1) * inverse
    tl.store(scores_pointer + pairs, tl.where(here, scores, -float("inf")), mask=pairs < num_pairs)


@triton.jit
def _shift_right(z, BITS: tl.constexpr):
    """Logical, as randomness.py needs it."""
    return (z >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _random_bits(key, ids):
    """randomness.bits: 32 bits for every id."""
    z = ids.to(tl.int64) * GOLDEN + key
    z = (z ^ _shift_right(z, 30)) * MIX_1
    z = (z ^ _shift_right(z, 27)) * MIX_2
    z = z ^ _shift_right(z, 31)
    return (z >> 32).to(tl.int32)


@triton.jit
def _round_at_random(values, key, ids, PADDED: tl.constexpr):
    """softmax._write_bfloat16: the same bits for the same (key, row, column)."""
    noise = _random_bits(key, ids)[:, None] ^ _random_bits(key, tl.arange(0, PADDED))[None, :]
    noise = noise * NOISE_1
    noise = (noise ^ (noise >> 12)) * NOISE_2
    noise = (noise >> 16) & 0xFFFF
    return ((values.to(tl.int32, bitcast=True) + noise) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=SIZES)
def move(
    x_pointer,  # [batch, DIM] unit embeddings times log2(e) / tau
    scale_pointer,  # [batch] what takes an exponential times x to the gradient
    shift_pointer,  # [batch]
    weight_pointer,
    momentum_pointer,
    inverse_pointer,
    dead_pointer,
    pair_rows_pointer,  # sorted
    pair_samples_pointer,
    pair_shares_pointer,  # q, scaled as the exponentials are
    bounds_pointer,  # [tiles + 1] pairs of each tile of rows
    batch,
    num_rows,
    first_id,
    key,
    lr,
    momentum,
    weight_decay,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BATCH_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    MASKED: tl.constexpr,
    SHIFTED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    EMULATED: tl.constexpr,
):
    tile = tl.program_id(0)
    rows = tile * ROW_TILE + tl.arange(0, ROW_TILE)
    inverse = tl.load(inverse_pointer + rows, mask=rows < num_rows, other=0.0)
    w = _operand(_load_tile(weight_pointer, rows, num_rows, DIM, PADDED), PRODUCTS, EMULATED)
    gradient = tl.zeros([ROW_TILE, PADDED], tl.float32)
    for start in range(0, batch, BATCH_TILE):
        samples = start + tl.arange(0, BATCH_TILE)
        x = _operand(_load_tile(x_pointer, samples, batch, DIM, PADDED), PRODUCTS, EMULATED)
        scale = tl.load(scale_pointer + samples, mask=samples < batch, other=0.0)[None, :]
        zeros = tl.zeros([ROW_TILE, BATCH_TILE], tl.float32)
        scores = _product(w, tl.trans(x), zeros, PRODUCTS, EMULATED) * inverse[:, None]
        if SHIFTED:
            scores -= tl.load(shift_pointer + samples, mask=samples < batch, other=0.0)[None, :]
        e = _operand(tl.exp2(scores) * scale, PRODUCTS, EMULATED)
        gradient = _product(e, x, gradient, PRODUCTS, EMULATED)
    columns = tl.arange(0, PADDED)
    for pair in range(tl.load(bounds_pointer + tile), tl.load(bounds_pointer + tile + 1)):
        sample = tl.load(pair_samples_pointer + pair)
        x = tl.load(x_pointer + sample * DIM + columns, mask=columns < DIM, other=0.0)
        share = tl.where(rows == tl.load(pair_rows_pointer + pair), tl.load(pair_shares_pointer + pair), 0.0)
        gradient -= share[:, None] * x[None, :]
    # SGD, as softmax.Move: (I - w^ w^^T) g / |w| = g / |w| - w (w.g) / |w|^3
    places, inside = _places(rows, DIM, PADDED), _inside(rows < num_rows, DIM, PADDED)
    # Another kind of load than above: else the compiler keeps the tile in registers all the while, and they run out.
    w = tl.load(weight_pointer + places, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    m = tl.load(momentum_pointer + places, mask=inside, other=0.0).to(tl.float32)
    along = tl.sum(w * gradient, axis=1)
    back = weight_decay - along * inverse * inverse * inverse
    m = m * momentum + gradient * inverse[:, None] + w * back[:, None]
    w = w - lr * m
    if weight_pointer.dtype.element_ty == tl.bfloat16:
        w = _round_at_random(w, key, first_id + rows, PADDED)
        m = _round_at_random(m, key + 1, first_id + rows, PADDED)
    lives = _counts(dead_pointer, rows, num_rows, MASKED)
    inside = _inside(lives, DIM, PADDED)
    tl.store(weight_pointer + places, w.to(weight_pointer.dtype.element_ty), mask=inside)
    tl.store(momentum_pointer + places, m.to(momentum_pointer.dtype.element_ty), mask=inside)
    length = tl.sqrt(tl.sum(tl.where(inside, w * w, 0.0), axis=1))
    tl.store(inverse_pointer + rows, tl.where(length < TINY, 0.0, 1 / tl.maximum(length, TINY)), mask=lives)

"""Random numbers as a function of counters.

Nothing here has a state. A number depends on (seed, purpose, counters...) alone, so a resumed or re-cut run draws
what an undisturbed one would have drawn.
"""

import hashlib
import math

import torch
from torch import Tensor

# Odd constants of the splitmix64 generator, written as signed 64-bit integers.
SPLITMIX = _GOLDEN, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


def key_of(seed: int, purpose: str, *counters: int) -> int:
    """A 63-bit key for one use of randomness, for example `key_of(seed, "order", epoch)`."""
    text = ":".join([str(seed), purpose, *map(str, counters)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *counters: int) -> torch.Generator:
    """A CPU generator that starts at the key of these counters."""
    return torch.Generator().manual_seed(key_of(seed, purpose, *counters))


def uniform(key: int, ids: Tensor, num: int) -> Tensor:
    """`num` uniform numbers in [0, 1) for every id, each a function of (key, id, position): [len(ids), num]."""
    positions = torch.arange(1, num + 1, dtype=torch.int64, device=ids.device)
    per_id = _mix(ids.to(torch.int64) * _GOLDEN + key)  # [ids]
    bits = _mix(per_id[:, None] + positions[None, :] * _GOLDEN)  # [ids, num]
    return _shift_right(bits, 40).to(torch.float32) * 2.0**-24


def bits(key: int, ids: Tensor) -> Tensor:
    """32 random bits for every id, as int32."""
    return (_mix(ids.to(torch.int64) * _GOLDEN + key) >> 32).to(torch.int32)


def integers(key: int, ids: Tensor, below: int) -> Tensor:
    """A number from 0 to below - 1 for every id, as int64."""
    return _shift_right(_mix(ids.to(torch.int64) * _GOLDEN + key), 1) % below


def normal(key: int, ids: Tensor, num: int) -> Tensor:
    """`num` standard normal numbers for every id (Box-Muller): [len(ids), num]."""
    u = uniform(key, ids, 2 * num)
    radius = torch.sqrt(-2.0 * torch.log1p(-u[:, :num]))  # 1 - u is in (0, 1], so the logarithm is finite
    return radius * torch.cos(2.0 * math.pi * u[:, num:])


def _mix(z: Tensor) -> Tensor:
    """The finalizer of splitmix64; integer overflow wraps, which is what it needs."""
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """A logical shift: torch's own copies the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)

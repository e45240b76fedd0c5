"""What matrix products compute in: float32, or less of it for speed on tensor cores.

Switches of the process (`torch.set_float32_matmul_precision`, `allow_tf32`) do not count inside `computed_in`: what is
said to be float32 is float32. tf32 rounds operands to 11 bits of mantissa, bfloat16 to 8; sums stay float32.

On AMD's processors oneDNN multiplies matrices of float32 a tenth faster than MKL, which torch takes. The switch that
lets oneDNN compute in bfloat16 makes torch ask oneDNN; without the matrix instructions of AMX it computes in float32
all the same. Whether it does is tried before it is used.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import torch
from torch import Tensor

from millionway.machine import has_bfloat16, processor
from millionway.settings.pretrain import Precision

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_SWITCHES = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # pyright: ignore[reportAttributeAccessIssue]
_lock, _num_within, _before = threading.Lock(), 0, []


@contextmanager
def computed_in(precision: Precision) -> Iterator[None]:
    """Within it, products of float32 tensors are computed so; operands of the other two are `rounded` before.

    The switches are those of the whole process: where several threads are within, the last to leave puts them back.
    """
    global _num_within, _before
    cpu = _cpu_switch()
    with _lock:
        if _num_within == 0:
            _before = [switch.fp32_precision for switch in _SWITCHES]
        _num_within += 1
        # Rounded operands are exact in tf32. On a CPU the products stay float32.
        for switch, inside in zip(_SWITCHES, ("ieee" if precision == "float32" else "tf32", cpu)):
            switch.fp32_precision = inside
    try:
        yield
    finally:
        with _lock:
            _num_within -= 1
            if _num_within == 0:
                for switch, value in zip(_SWITCHES, _before):
                    switch.fp32_precision = value


@functools.cache
def _cpu_switch() -> str:
    """By the processor alone, so that a run that goes on has the same bits."""
    is_amd = "AMD" in str(processor().get("cpu_name", ""))
    return "bf16" if is_amd and _is_float32("bf16") else "ieee"


def _is_float32(value: str) -> bool:
    """Whether products of float32 keep its 24 bits with this value of oneDNN's switch."""
    switch = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = switch.fp32_precision
    # bfloat16 and tf32 would read 1 + 2^-20 as 1.
    rows, columns = torch.full((2048, 128), 1 + 2.0**-20), torch.eye(128)
    try:
        switch.fp32_precision = value
        with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
            return torch.equal(rows @ columns, rows) and torch.equal(columns @ rows.T, rows.T)
    except RuntimeError:  # a torch that does not know it
        return False
    finally:
        switch.fp32_precision = before


def operand_dtype(precision: Precision, like: Tensor) -> torch.dtype:
    """What the operands of products are stored in: float32, to be `rounded`, but for bfloat16 on a CPU that has
    instructions for it. There a product of two bfloat16 tensors takes a quarter of the time, and is bfloat16 itself."""
    is_narrow = precision == "bfloat16" and like.dtype == torch.float32 and like.device.type == "cpu"
    return torch.bfloat16 if is_narrow and has_bfloat16(like.device) else like.dtype


def operand(x: Tensor, precision: Precision, dtype: torch.dtype) -> Tensor:
    """As a product reads it."""
    return rounded(x, precision) if x.dtype == dtype else x.to(dtype)


def rounded(x: Tensor, precision: Precision) -> Tensor:
    """As tensor cores read it; the same tensor for float32, and for tf32 where the device rounds by itself."""
    if precision == "bfloat16":
        return x.bfloat16().to(x.dtype)
    if precision == "tf32" and x.dtype == torch.float32 and x.device.type != "cuda":
        # To the nearest: half of the last bit that stays is added, then the 13 lower ones are cut off.
        return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return x

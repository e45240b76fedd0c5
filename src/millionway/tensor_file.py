"""Tensors into a safetensors file, a few rows at a time: what just fits into memory has no room for a second copy.

The library's own writing leaves a file under a name of its own if it is killed, and lets nobody else read it.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
BYTES_AT_ONCE = 1 << 22


def write_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str] | None = None) -> None:
    """about: for the header."""
    # The largest numbers first, as the library has it: so each tensor begins at a multiple of its numbers' size.
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
    with open(path, "wb", buffering=BYTES_AT_ONCE) as file:
        file.write(header({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}, about))
        for tensor in tensors.values():
            rows = tensor.detach()
            for some in rows.reshape(-1).split(BYTES_AT_ONCE) if rows.ndim < 2 else rows.split(rows_at_once(rows)):
                file.write(some.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def header(
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], about: dict[str, str] | None, multiple: int = 8
) -> bytes:
    """Of tensors that follow each other, by dtype and shape; its length is a multiple of so many bytes."""
    names, at = {dtype: name for name, dtype in DTYPES.items()}, 0
    entries: dict[str, Any] = {} if about is None else {"__metadata__": about}
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % multiple)
    return len(text).to_bytes(8, "little") + text


def rows_at_once(tensor: Tensor) -> int:
    return max(1, BYTES_AT_ONCE // max(1, math.prod(tensor.shape[1:]) * tensor.element_size()))

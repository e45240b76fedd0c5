"""A CUDA device that is not there: shapes, dtypes and devices are real, numbers are not. Mixed devices are errors.

Tensors on the CPU stay real. Whatever makes the host wait for the device is counted, and answered with zeros.
"""

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from millionway.model.products import computed_in

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
COPIES = (aten._to_copy.default, aten.copy_.default)
FOUND = 2  # how many places a search on the device is said to have found


class FakeCuda(TorchDispatchMode):
    """syncs: for each, the line of this project that waited."""

    def __init__(self) -> None:
        super().__init__()
        self.fake, self.syncs = FakeTensorMode(allow_non_fake_inputs=True), []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        to = kwargs.get("device")
        if not any(isinstance(each, FakeTensor) for each in tensors) and (
            to is None or torch.device(to).type != "cuda"
        ):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            self.wait()
            return True if args[0].dtype == torch.bool else 0.5 if args[0].dtype.is_floating_point else 0
        if func is aten.nonzero.default:
            self.wait()
            with self.fake:
                return torch.empty(min(FOUND, args[0].numel()), args[0].dim(), dtype=torch.int64, device=CUDA)
        if func is aten.bincount.default:
            self.wait()
            with self.fake:
                return torch.empty(FOUND, dtype=torch.int64, device=CUDA)
        if func is aten._unique2.default:
            self.wait()
            with self.fake:
                found = args[0].new_empty(min(FOUND, args[0].numel()))
                return found, torch.empty_like(args[0], dtype=torch.int64), torch.empty_like(found, dtype=torch.int64)
        if func in COPIES:
            return self.copy(func, args, kwargs)
        if func in (aten.index.Tensor, aten.index_put_.default):
            args = (args[0], [self.found(each) for each in args[1]], *args[2:])
        with self.fake:
            return func(*args, **kwargs)

    def found(self, index: torch.Tensor | None) -> torch.Tensor | None:
        """A mask as an index is a search on the device."""
        if index is None or index.dtype != torch.bool:
            return index
        self.wait()
        assert index.dim() == 1
        with self.fake:
            return torch.empty(min(FOUND, len(index)), dtype=torch.int64, device=CUDA)

    def copy(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """From host to device it is waited for unless it is said that it need not be; back to the host always."""
        target, source = (None, args[0]) if func is aten._to_copy.default else args[:2]
        device = torch.device(kwargs.get("device") or source.device) if target is None else target.device
        if device.type == source.device.type:
            with self.fake:
                return func(*args, **kwargs)
        is_free = kwargs.get("non_blocking", False) or (func is aten.copy_.default and len(args) > 2 and args[2])
        if device.type == "cpu" or not is_free:
            self.wait()
        if device.type == "cpu":
            with unset_fake_temporarily():
                return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        with self.fake:
            made = torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype, device=CUDA)
            return made if target is None else func(target, made)

    def wait(self) -> None:
        ours = [each for each in traceback.extract_stack() if "/millionway/" in each.filename]
        self.syncs.append(f"{ours[-1].filename.split('/millionway/')[1]}:{ours[-1].lineno}" if ours else "test")

    def read(self, tensor: torch.Tensor) -> list:
        """`tolist`, at one go."""
        self.wait()
        with unset_fake_temporarily():
            return torch.zeros(tensor.shape, dtype=tensor.dtype).tolist()

    def tensor(self, real: torch.Tensor) -> torch.Tensor:
        with self.fake:
            return torch.empty(real.shape, dtype=real.dtype, device=CUDA)


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    with computed_in("float32"):  # tries real products, once
        pass
    with ExitStack() as stack:
        stack.enter_context(mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False))
        stack.enter_context(mock.patch("torch.cuda.is_bf16_supported", lambda *_, **__: True))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda self, *_: self))
        mode = FakeCuda()
        stack.enter_context(mode.fake)  # below, so that nobody looks for a driver
        stack.enter_context(mode)
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", lambda tensor: mode.read(tensor)))
        yield mode


def on_fake_cuda(module: torch.nn.Module, mode: FakeCuda) -> torch.nn.Module:
    """Its parameters and buffers, replaced."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(mode.tensor(parameter), parameter.requires_grad)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = mode.tensor(buffer)
    return module

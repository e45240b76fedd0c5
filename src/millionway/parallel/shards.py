"""Sharded state to and from disk: safetensors, written by torch.distributed.checkpoint; nothing is pickled."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


def save_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write this rank's part of each tensor below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with _plain_errors():
        save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True), no_dist=True)


def load_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill the given tensors in place with this rank's part of what was saved."""
    state = dict(tensors)
    with _plain_errors():
        load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, tensor in tensors.items():
        if state[name] is not tensor:
            tensor.copy_(state[name])


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What went wrong, and not torch's wrapping of it, which is not even an Exception."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a group of one needs no process group
        try:
            yield
        except CheckpointException as error:
            failures = [failure[0] for failure in error.failures.values()]
            raise failures[0] if failures else RuntimeError(str(error)) from None

"""Sharded state to and from disk: safetensors, written by torch.distributed.checkpoint; nothing is pickled."""

import warnings
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor


def save_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write this rank's part of each tensor below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a group of one needs no process group
        dcp.save(
            {name: tensor for name, tensor in tensors.items()},
            storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True),
            no_dist=True,
        )


def load_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill the given tensors in place with this rank's part of what was saved."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        state = dict(tensors)
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, tensor in tensors.items():
        if state[name] is not tensor:
            tensor.copy_(state[name])

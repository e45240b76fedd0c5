"""Sharded state to and from disk: safetensors, written by torch.distributed.checkpoint; nothing is pickled."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from millionway.parallel.group import Group


def save_shards(tensors: dict[str, Tensor], folder: Path, group: Group, num_rows: int) -> None:
    """Write this rank's rows of each tensor of `num_rows` rows below `folder`. All ranks do so together."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _plain_errors():
        state = _of_all_ranks(tensors, group, num_rows)
        save(state, storage_writer=writer, process_group=group.connections, no_dist=group.size == 1)


def load_shards(tensors: dict[str, Tensor], folder: Path, group: Group, num_rows: int) -> None:
    """Fill the given tensors in place with this rank's rows of what was saved, by any number of ranks."""
    state = _of_all_ranks(tensors, group, num_rows)
    with _plain_errors():
        reader = HuggingFaceStorageReader(str(folder))
        load(state, storage_reader=reader, process_group=group.connections, no_dist=group.size == 1)
    for name, tensor in tensors.items():
        loaded = state[name].to_local() if isinstance(state[name], DTensor) else state[name]
        if loaded is not tensor:
            tensor.copy_(loaded)


def _of_all_ranks(tensors: dict[str, Tensor], group: Group, num_rows: int) -> dict[str, Any]:
    """Each rank's rows as its part of one tensor, cut as layout.local_range cuts."""
    if group.size == 1:
        return dict(tensors)
    device = next(iter(tensors.values())).device.type
    mesh = DeviceMesh(device, torch.arange(group.size))
    return {
        name: DTensor.from_local(
            local,
            mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size([num_rows, *local.shape[1:]]),
            stride=local.stride(),
        )
        for name, local in tensors.items()
    }


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

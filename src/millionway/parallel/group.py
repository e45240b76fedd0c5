"""The processes that train together."""

import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, _abort_process_group
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from millionway.parallel.launcher import local_rank, times_restarted, world_size

DEFAULT_TIMEOUT = 1800.0


@dataclass(frozen=True)
class Group:
    """Rank and size. A group of one is the ordinary case and takes the same path."""

    rank: int = 0
    size: int = 1
    connections: Any = field(default=None, repr=False, compare=False)
    """torch's process group; None is the default one"""

    @staticmethod
    def current(timeout: float = DEFAULT_TIMEOUT, with_cuda: bool = True) -> "Group":
        """The torchrun world if there is one, else a group of one. `timeout`: seconds to wait for a silent rank.

        with_cuda: whether tensors on GPUs will travel, if there are any; without, no GPU is touched.
        """
        if not dist.is_initialized():
            if world_size() == 1:
                return Group()
            _join(timeout, with_cuda and torch.cuda.is_available())
        return Group(dist.get_rank(), dist.get_world_size())

    def beside(self, timeout: float = DEFAULT_TIMEOUT) -> "Group":
        """The same ranks with connections of their own, for a thread beside the training. All ranks ask for it."""
        if self.size == 1:
            return self
        return Group(self.rank, self.size, dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))

    def data_parallel(self, network: nn.Module) -> nn.Module:
        """The network with its gradients averaged over the ranks. BN statistics stay each rank's own."""
        if self.size == 1 or not any(parameter.requires_grad for parameter in network.parameters()):
            return network
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # before torch 2.15
        return _DataParallel(network, **{name: False})

    def own_part(self, batch: Tensor) -> Tensor:
        """This rank's part of a batch, which all ranks have whole."""
        return batch.view(self.size, -1)[self.rank]

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0


class _DataParallel(DistributedDataParallel):
    """Does some other work while the last gradients are on their way."""

    def __init__(self, network: nn.Module, **options: bool) -> None:
        super().__init__(network, **options)  # pyright: ignore[reportArgumentType]
        self.meanwhile: list[Callable[[], None]] = []
        # Not a method of this object: torch would hold it for ever, and with it gloo's threads after `leave`.
        self.register_comm_hook(self.meanwhile, _DataParallel._send)

    @staticmethod
    def _send(meanwhile: list[Callable[[], None]], bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The mean over the ranks of a bucket of gradients; gloo's threads, or NCCL's stream, carry it.

        Gradients are arranged anew after the first backward, and the order in which three ranks are added up depends on
        where a number is. On a CPU a run that goes on has the same bits, so there it must not matter: sums of float32
        in float64 are exact.
        """
        gradients, size = bucket.buffer(), dist.get_world_size()
        is_exact = gradients.device.type == "cpu" and size > 2
        work = dist.all_reduce(gradients.double() if is_exact else gradients.mul_(1 / size), async_op=True)
        assert work is not None

        def mean(sums: torch.futures.Future) -> Tensor:
            total = sums.value()[0]
            return (total / size).to(gradients.dtype) if is_exact else total

        arrived = work.get_future().then(mean)
        while bucket.is_last() and meanwhile:
            meanwhile.pop()()
        return arrived


@contextmanager
def while_gradients_travel(network: nn.Module, work: Callable[[], None]) -> Iterator[None]:
    """Within it a backward through the network does the work too: as soon as all gradients are on their way to the
    other ranks, in the thread that would wait for them. At the end, if there was no such moment."""
    meanwhile = network.meanwhile if isinstance(network, _DataParallel) else []
    meanwhile.append(work)
    try:
        yield
        while meanwhile:
            meanwhile.pop()()
    finally:
        meanwhile.clear()


def without_gradient_sync(network: nn.Module) -> AbstractContextManager[None]:
    """Within it, backward through a network of `Group.data_parallel` adds up gradients and tells no other rank."""
    return network.no_sync() if isinstance(network, DistributedDataParallel) else nullcontext()


def is_lost_contact(error: BaseException) -> bool:
    """Whether the other ranks could not be reached, rather than something being wrong here."""
    return isinstance(error, dist.DistError) or re.search("gloo|nccl", str(error), re.IGNORECASE) is not None


_joined_here = _with_nccl = False


def leave(failed: bool = False) -> None:
    """Say goodbye to the other ranks, if it was us who joined them.

    failed: without waiting for them. They may be in the middle of a collective that will never be complete, and NCCL
    would wait for it; an aborted connection ends it on their side too. gloo never waits here.
    """
    global _joined_here
    if _joined_here and dist.is_initialized():
        if failed and _with_nccl:
            _abort_process_group()
        else:
            dist.destroy_process_group()
    _joined_here = False


def _join(timeout: float, with_cuda: bool) -> None:
    global _joined_here, _with_nccl
    _with_nccl = with_cuda
    if with_cuda:
        torch.cuda.set_device(local_rank())
    # Numbers on the CPU (checkpoints, counts) travel by gloo also where the embeddings travel by nccl.
    backend = "cpu:gloo,cuda:nccl" if with_cuda else "gloo"
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
        # torchrun keeps its notes over a restart, and gloo would call the processes that are gone.
        store = PrefixStore(f"millionway/{times_restarted()}", store)
        store.set_timeout(timedelta(seconds=timeout))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
        _joined_here = True
    except (dist.DistError, ValueError) as error:
        rank, size = os.environ.get("RANK", "?"), world_size()
        raise ValueError(
            f"rank {rank} of {size} could not join the others: not all of them came, or another number of processes "
            f"was announced ({str(error).splitlines()[0]})"
        ) from None

"""What the ranks tell each other. In a group of one, everything is its own answer."""

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from millionway.parallel.group import Group
from millionway.parallel.layout import local_range

Result = TypeVar("Result")


def all_gather(group: Group, own: Tensor) -> Tensor:
    """All ranks' parts, one after the other; they are equally large."""
    if group.size == 1:
        return own
    everybody = own.new_empty(group.size * len(own), *own.shape[1:])
    dist.all_gather_into_tensor(everybody, own.contiguous(), group=group.connections)
    return everybody


def all_gather_together(group: Group, *own: Tensor) -> list[Tensor]:
    """`all_gather` for several tensors of the same length, at one go: as bytes."""
    if group.size == 1:
        return list(own)
    rows = [_as_bytes(part) for part in own]
    everybody = all_gather(group, torch.cat(rows, dim=1)).split([part.shape[1] for part in rows], dim=1)
    return [
        part.contiguous().view(like.dtype).view(-1, *like.shape[1:]) for part, like in zip(everybody, own, strict=True)
    ]


def _as_bytes(rows: Tensor) -> Tensor:
    """[n, ...] of any dtype as [n, bytes]."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:])).contiguous().view(torch.uint8)


def all_gather_uneven(group: Group, own: Tensor) -> Tensor:
    """All ranks' parts, one after the other; they may differ in length."""
    if group.size == 1:
        return own
    lengths = all_gather(group, torch.tensor([len(own)], device=own.device)).tolist()
    parts = all_gather(group, _padded(own, max(lengths))).split(max(lengths)) if max(lengths) else [own]
    return torch.cat([part[:length] for part, length in zip(parts, lengths)])


def all_reduce(group: Group, tensor: Tensor) -> Tensor:
    """The sum over all ranks, written into the tensor."""
    if group.size > 1:
        dist.all_reduce(tensor, group=group.connections)
    return tensor


def all_reduce_max(group: Group, tensor: Tensor) -> Tensor:
    """The largest of all ranks, element by element, written into the tensor."""
    if group.size > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group.connections)
    return tensor


def reduce_scatter(group: Group, tensor: Tensor) -> Tensor:
    """Each rank gets its part of the sum: [size * n, ...] -> [n, ...]."""
    if group.size == 1:
        return tensor
    part = tensor.new_empty(len(tensor) // group.size, *tensor.shape[1:])
    dist.reduce_scatter_tensor(part, tensor.contiguous(), group=group.connections)
    return part


def all_gather_object(group: Group, word: Any) -> list[Any]:
    """What each rank says, by rank: small things, at the start and the end of a run."""
    if group.size == 1:
        return [word]
    words: list[Any] = [None] * group.size
    dist.all_gather_object(words, word, group=group.connections)
    return words


class OtherRankFailed(RuntimeError):
    """What stopped another rank, in its words."""


def all_or_none(group: Group, work: Callable[[], Result]) -> Result:
    """Every rank does its work; if it fails on one of them, it fails on all, and each says why."""
    if group.size == 1:
        return work()
    try:
        result = work()
    except Exception as error:
        all_gather_object(group, str(error) or repr(error))
        raise
    reasons = all_gather_object(group, None)
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise OtherRankFailed(f"rank {rank}: {reason}")
    return result


def on_first_rank(group: Group, work: Callable[[], Result]) -> Result | None:
    """`all_or_none` for what only the first rank does; None on the others."""
    return all_or_none(group, work if group.is_first else lambda: None)


def any_rank(group: Group, own: bool) -> bool:
    """Whether it is so on one of the ranks."""
    return own if group.size == 1 else bool(all_reduce_max(group, torch.tensor([own], dtype=torch.int32)))


def ring(group: Group, num_instances: int, *own: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """(first class, tensors) of every rank's rows in turn, our own first.

    They travel from rank to rank, size - 1 hops; the next ones are under way while the present ones are used. All ranks
    go all the way round. Memory: two shards besides our own.
    """
    if group.size == 1:
        yield 0, own
        return
    per_rank = local_range(num_instances, 0, group.size)[1]
    present = [_padded(_as_bytes(part), per_rank) for part in own]
    coming, under_way = _pass_on(group, present)
    yield local_range(num_instances, group.rank, group.size)[0], own
    for hop in range(1, group.size):
        for each in under_way:
            each.wait()
        present = coming
        if hop < group.size - 1:
            coming, under_way = _pass_on(group, present)
        start, stop = local_range(num_instances, (group.rank - hop) % group.size, group.size)
        yield (
            start,
            tuple(
                part[: stop - start].view(like.dtype).view(stop - start, *like.shape[1:])
                for part, like in zip(present, own)
            ),
        )


def _padded(rows: Tensor, length: int) -> Tensor:
    padded = rows.new_zeros(length, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded


def _pass_on(group: Group, parts: list[Tensor]) -> tuple[list[Tensor], list[dist.Work]]:
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    coming = [torch.empty_like(part) for part in parts]
    sends = [dist.P2POp(dist.isend, part, right, group.connections) for part in parts]
    receives = [dist.P2POp(dist.irecv, part, left, group.connections) for part in coming]
    return coming, dist.batch_isend_irecv([*sends, *receives])

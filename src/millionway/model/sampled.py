"""Sampled classes, for the ablation: the batch's own and some others, drawn anew in each step."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from millionway import randomness
from millionway.model.rows import Rows
from millionway.parallel import collectives
from millionway.parallel.group import Group


def draw(
    key: int, num_others: int, instance_ids: Int[Tensor, " batch"], alive: Bool[Tensor, " local_classes"], group: Group
) -> Int[Tensor, " chosen"]:
    """Ascending ids of the batch's own classes and `num_others` others of all ranks, without replacement."""
    alive = collectives.all_gather_uneven(group, alive.to(torch.uint8)).bool()
    everyone = torch.arange(len(alive), device=alive.device)
    lottery = randomness.uniform(key, everyone, 1)[:, 0]
    lottery.masked_fill_(~alive, 2.0)
    lottery.index_fill_(0, instance_ids.clamp(0, len(alive) - 1), -1.0)  # always in
    num_own = int((lottery < 0).sum())
    chosen = torch.argsort(lottery, stable=True)[: min(num_own + num_others, int(alive.sum()))]
    return chosen.sort().values


def take(
    rows: Rows, chosen: Int[Tensor, " chosen"], targets: Int[Tensor, "batch targets"], local_range: tuple[int, int]
) -> tuple[Rows, Int[Tensor, " here"], Int[Tensor, "batch targets"]]:
    """(copies of the chosen rows that live here, their places among all of ours, the targets as places among them)."""
    start, stop = local_range
    first, last = torch.searchsorted(chosen, torch.tensor([start, stop], device=chosen.device)).tolist()
    here = chosen[first:last] - start
    velocity = rows.velocity[here.to(rows.velocity.device)].to(here.device)
    some = Rows(rows.gather(here), velocity, rows.inverse_norm[here], rows.block)
    return some, here, torch.searchsorted(chosen, targets) - first


def put_back(rows: Rows, some: Rows, here: Int[Tensor, " here"]) -> None:
    """Write the copies that `take` made, after an update."""
    there = here.to(rows.weight.device)
    rows.weight[there] = some.weight.to(there.device)
    rows.velocity[there] = some.velocity.to(there.device)
    rows.inverse_norm[here] = some.inverse_norm

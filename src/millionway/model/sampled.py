"""Sampled classes, for the ablation: the batch's own and some others, drawn anew in each step.

They are drawn on the host, which waits for the batch's ids to do so; what it takes grows with the number of drawn ones.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from millionway import randomness
from millionway.model.rows import Rows
from millionway.parallel import collectives
from millionway.parallel.group import Group


def draw(
    key: int,
    num_others: int,
    instance_ids: Int[Tensor, " batch"],
    dead: Bool[Tensor, " local_classes"] | None,
    local_range: tuple[int, int],
    num_classes: int,
    group: Group,
) -> Int[Tensor, " chosen"]:
    """Ascending ids, on the host, of the batch's own classes and `num_others` others of all ranks, drawn without
    replacement.

    dead: which of the classes here are dead; None if none is.
    """
    has_dead = instance_ids.new_full((1,), dead is not None)
    told = torch.cat([instance_ids, collectives.all_gather(group, has_dead)]).cpu()
    own = told[: len(instance_ids)].unique().clamp(0, num_classes - 1)  # what is out of range is told later
    left_out = own
    if bool(told[len(instance_ids) :].any()):
        here = instance_ids.new_empty(0) if dead is None else dead.nonzero()[:, 0] + local_range[0]
        left_out = torch.cat([own, collectives.all_gather_uneven(group, here).cpu()]).unique()
    return torch.cat([own, _others(key, num_others, left_out, num_classes)]).unique()


def _others(key: int, num: int, left_out: Int[Tensor, " some"], num_classes: int) -> Int[Tensor, " num"]:
    """Classes that are not left out, in the order in which they were drawn."""
    if 2 * num >= num_classes - len(left_out):  # most of them
        everyone = torch.arange(num_classes)
        rest = everyone[~torch.isin(everyone, left_out)]
        return rest[torch.argsort(randomness.uniform(key, rest, 1)[:, 0], stable=True)[:num]]
    found, drawn = left_out.new_empty(0), 0
    while len(found) < num:
        new = randomness.integers(key, torch.arange(drawn, drawn + 2 * num), num_classes)
        drawn += 2 * num
        found = _first_of_each(torch.cat([found, new[~torch.isin(new, left_out)]]))
    return found[:num]


def _first_of_each(values: Int[Tensor, " n"]) -> Int[Tensor, " distinct"]:
    """Without repeats, in their order."""
    order = torch.argsort(values, stable=True)
    is_new = torch.ones(len(values), dtype=torch.bool)
    is_new[1:] = values[order][1:] != values[order][:-1]
    return values[order[is_new].sort().values]


def take(
    rows: Rows, chosen: Int[Tensor, " chosen"], targets: Int[Tensor, "batch targets"], local_range: tuple[int, int]
) -> tuple[Rows, Int[Tensor, " here"], Int[Tensor, "batch targets"]]:
    """(copies of the chosen rows that live here, their places among all of ours, the targets as places among them)."""
    start, stop = local_range
    first, last = torch.searchsorted(chosen, torch.tensor([start, stop])).tolist()
    device = rows.inverse_norm.device
    here = (chosen[first:last] - start).to(device, non_blocking=True)
    velocity = rows.velocity[here.to(rows.velocity.device)].to(device)
    some = Rows(rows.gather(here), velocity, rows.inverse_norm[here], rows.block)
    return some, here, torch.searchsorted(chosen.to(device, non_blocking=True), targets) - first


def put_back(rows: Rows, some: Rows, here: Int[Tensor, " here"]) -> None:
    """Write the copies that `take` made, after an update."""
    there = here.to(rows.weight.device)
    rows.weight[there] = some.weight.to(there.device)
    rows.velocity[there] = some.velocity.to(there.device)
    rows.inverse_norm[here] = some.inverse_norm

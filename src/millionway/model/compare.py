"""Embeddings against all rows: is the own class the nearest one?"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from millionway.model.rows import Rows
from millionway.parallel import collectives
from millionway.parallel.group import Group
from millionway.parallel.layout import find_places


@dataclass
class Comparison:
    """Of embeddings with all rows."""

    num_ahead: Int[Tensor, " batch"]
    """how many other classes score as high as the own one, up to the rounding of a cosine: 1e-6, or 1e-12 in float64"""
    own: Float[Tensor, " batch"]
    """cosine with the own row"""
    nearest_other: Float[Tensor, " batch"]
    """the largest cosine with another row"""


def own_cosines(
    unit_x: Float[Tensor, "batch dim"], ids: Int[Tensor, " batch"], rows: Rows, group: Group
) -> Float[Tensor, " batch"]:
    """With the row of its class, wherever it lives; NaN where that is dead."""
    places, here = find_places(ids, rows.first_id, rows.first_id + len(rows))
    if len(rows) == 0:
        return collectives.all_reduce(group, unit_x.new_zeros(len(ids)))
    own_rows = rows.gather(places).to(unit_x.dtype) * rows.inverse_norm[places]
    cosines = (unit_x * own_rows).sum(dim=1).masked_fill_(~here, 0)
    if rows.dead is not None:
        cosines.masked_fill_(here & rows.dead[places], torch.nan)
    return collectives.all_reduce(group, cosines)


def with_all(
    unit_x: Float[Tensor, "batch dim"],
    ids: Int[Tensor, " batch"],
    own: Float[Tensor, " batch"],
    rows: Rows,
    group: Group,
) -> Comparison:
    """Of all ranks' embeddings, whose cosines with their own rows are `own`; each rank gets its part."""
    high = (own - (1e-12 if unit_x.dtype == torch.float64 else 1e-6))[:, None]
    num_ahead, nearest = torch.zeros_like(ids), unit_x.new_full((len(ids),), -torch.inf)
    unit_rows = rows.room(unit_x.dtype)
    for block in rows.stream(rows.blocks()):
        cosines = unit_x @ block.unit(out=unit_rows).T
        if block.dead is not None:
            cosines.masked_fill_(block.dead, -torch.inf)
        place, here = find_places(ids[:, None], block.first_id, block.first_id + len(block))
        cosines.scatter_(1, place, cosines.gather(1, place).masked_fill_(here, -torch.inf))  # itself does not count
        num_ahead += (cosines > high).sum(dim=1)
        torch.maximum(nearest, cosines.amax(dim=1), out=nearest)
    collectives.all_reduce(group, num_ahead)
    collectives.all_reduce_max(group, nearest)
    return Comparison(*(group.own_part(whole) for whole in (num_ahead, own, nearest)))

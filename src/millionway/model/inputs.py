"""What the classifier is given: checked, gathered from all ranks, and turned into targets."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from millionway.parallel import collectives
from millionway.parallel.group import Group
from millionway.parallel.layout import find_places


class NotFiniteError(ValueError):
    """Embeddings or rows with NaN or infinity."""


def check_form(vectors: Tensor, instance_ids: Tensor, dim: int) -> None:
    """Shapes and dtypes of vectors and the ids of their instances."""
    if not vectors.is_floating_point():
        raise ValueError(f"expected vectors of floating point numbers, not {vectors.dtype}")
    if vectors.ndim != 2 or vectors.shape[1] != dim or len(vectors) == 0:
        raise ValueError(f"expected vectors of shape [batch, {dim}], not {list(vectors.shape)}")
    if instance_ids.dtype != torch.int64 or instance_ids.shape != vectors.shape[:1]:
        raise ValueError(
            f"expected {len(vectors)} int64 instance ids, not {instance_ids.dtype} {list(instance_ids.shape)}"
        )


def check_ids(ids: Tensor, num_instances: int, name: str) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= num_instances:
        raise ValueError(f"{name} run from {low} to {high}, but there are {num_instances} instances")


def check_finite(vectors: Tensor, instance_ids: Tensor) -> None:
    finite = torch.isfinite(vectors).all(dim=1)
    if not bool(finite.all()):
        first = int((~finite).nonzero()[0, 0])
        raise NotFiniteError(
            f"{int((~finite).sum())} of {len(finite)} vectors are not finite (NaN or infinity);"
            f" the first belongs to instance {int(instance_ids[first])}"
        )


def all_gather_checked(
    group: Group, embeddings: Tensor, instance_ids: Tensor, num_instances: int
) -> tuple[Float[Tensor, "global_batch dim"], Int[Tensor, " global_batch"]]:
    """All ranks' embeddings and their ids. Their values are checked here, so that all ranks complain together."""
    x, ids = collectives.all_gather_together(group, embeddings, instance_ids)
    check_ids(ids, num_instances, "instance ids")
    check_finite(x, ids)
    return x, ids


def targets_of(
    instance_ids: Int[Tensor, " batch"],
    hardest: Tensor | None,
    alpha: float,
    group: Group,
    local_range: tuple[int, int],
    num_instances: int,
) -> tuple[Int[Tensor, "batch targets"], list[float]]:
    """Classes in the label of each instance, and y, their weights: itself and, smoothed, its hardest classes.

    hardest: [local_classes, k], by the ranks that own the rows.
    """
    if not 0 <= alpha < 1:
        raise ValueError(f"alpha must be at least 0 and below 1, not {alpha}")
    own = instance_ids[:, None]
    if hardest is None or alpha == 0:
        return own, [1.0]
    num_local = local_range[1] - local_range[0]
    if hardest.ndim != 2 or len(hardest) != num_local or hardest.shape[1] == 0:
        raise ValueError(f"expected a table of hardest classes of shape [{num_local}, k], not {list(hardest.shape)}")
    if hardest.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"expected a table of int32 ids of hardest classes, not {hardest.dtype}")
    k = hardest.shape[1]
    places, here = find_places(instance_ids, *local_range)
    others = torch.zeros(len(own), k, dtype=torch.int32, device=own.device)
    others[here] = hardest[places[here]].to(torch.int32)
    others = collectives.all_reduce(group, others).to(torch.int64)  # each row comes from the rank that owns it
    check_ids(others, num_instances, "the batch's hardest classes")
    return torch.cat([own, others], dim=1), [1 - alpha] + k * [alpha / k]

"""What the classifier is given: checked, gathered from all ranks, and turned into targets."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from millionway.parallel import collectives
from millionway.parallel.group import Group
from millionway.parallel.layout import find_places

STORAGE = (torch.float32, torch.float64, torch.bfloat16)


class NotFiniteError(ValueError):
    """Embeddings or rows with NaN or infinity."""


def check_options(
    num_instances: int,
    dim: int,
    temperature: float,
    storage: torch.dtype,
    keep_bytes: int | None,
    classes_per_step: int | None,
) -> None:
    """What a classifier is made with."""
    if num_instances < 1 or dim < 1:
        raise ValueError(f"a classifier needs at least one instance and one dimension, not {num_instances} x {dim}")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite, not {temperature}")
    if storage not in STORAGE:
        raise ValueError(f"storage must be one of {', '.join(map(str, STORAGE))}, not {storage}")
    if classes_per_step is not None and classes_per_step < 1:
        raise ValueError(f"classes_per_step must be positive, not {classes_per_step}")
    if keep_bytes is not None and keep_bytes < 0:
        raise ValueError(f"keep_bytes must not be negative, not {keep_bytes}")


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


def find_trouble(x: Tensor, targets: Int[Tensor, "batch targets"], loss: Tensor, num_instances: int) -> Tensor:
    """Whether anything is wrong with what was computed, on the device: 0 if nothing is. `explain` says what."""
    wrong = (targets < 0).any() | (targets >= num_instances).any() | ~torch.isfinite(x).all() | ~torch.isfinite(loss)
    return wrong.to(torch.int64)[None]


def explain(x: Tensor, targets: Int[Tensor, "batch targets"], num_instances: int) -> None:
    """Raise what is wrong with embeddings, ids or hardest classes; the same on all ranks, as they have all of them."""
    check_ids(targets[:, 0], num_instances, "instance ids")
    check_finite(x, targets[:, 0])
    if targets.shape[1] > 1:
        check_ids(targets[:, 1:], num_instances, "the batch's hardest classes")


def targets_of(
    instance_ids: Int[Tensor, " batch"],
    hardest: Tensor | None,
    alpha: float,
    group: Group,
    local_range: tuple[int, int],
) -> Int[Tensor, "batch targets"]:
    """Classes in the label of each instance: itself and, smoothed, its hardest classes.

    hardest: [local_classes, k], by the ranks that own the rows.
    """
    if not 0 <= alpha < 1:
        raise ValueError(f"alpha must be at least 0 and below 1, not {alpha}")
    own = instance_ids[:, None]
    if hardest is None or alpha == 0:
        return own
    num_local = local_range[1] - local_range[0]
    if hardest.ndim != 2 or len(hardest) != num_local or hardest.shape[1] == 0:
        raise ValueError(f"expected a table of hardest classes of shape [{num_local}, k], not {list(hardest.shape)}")
    if hardest.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"expected a table of int32 ids of hardest classes, not {hardest.dtype}")
    places, here = find_places(instance_ids, *local_range)
    others = torch.zeros(len(own), hardest.shape[1], dtype=torch.int32, device=own.device)
    if num_local:
        others = torch.where(here[:, None], hardest[places].to(torch.int32), others)
    others = collectives.all_reduce(group, others).to(torch.int64)  # each row comes from the rank that owns it
    return torch.cat([own, others], dim=1)


def label_weights(num_targets: int, alpha: float, like: Tensor) -> Float[Tensor, " targets"]:
    """y of the targets. Written on the device: numbers sent there would have to be waited for."""
    if num_targets == 1:
        return like.new_ones(1)
    weights = like.new_full((num_targets,), alpha / (num_targets - 1))
    weights[:1].fill_(1 - alpha)
    return weights

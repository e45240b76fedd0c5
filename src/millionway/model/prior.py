"""The contrastive prior: before step 0, row i becomes what the untrained network says of image i."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from millionway.model.classifier import InstanceClassifier
from millionway.parallel import collectives
from millionway.parallel.sync_bn import average_statistics


@dataclass
class PriorProgress:
    """How far the pass over the images has come, so that it can go on."""

    batches: int = 0
    """done"""
    rows: int = 0
    """written"""
    lengths: float = 0.0
    """their sum"""
    untrained: dict[str, float] = field(default_factory=dict)
    """what was measured before it began, since BN statistics move"""

    @property
    def mean_length(self) -> float:
        return self.lengths / max(1, self.rows)


def has_running_statistics(network: nn.Module) -> bool:
    return bool(_bn_layers(network))


@torch.no_grad()
def write_prior(
    mode: str,
    network: nn.Module,
    classifier: InstanceClassifier,
    batches: Iterable[tuple[Tensor, Tensor]],
    row_norm: float | None,
    progress: PriorProgress,
) -> float:
    """Fill the rows from one pass over the images, in the order given. Returns the mean length of the rows.

    batches: those that are left; `progress` counts them. Statistics of BN stay as the pass leaves them.

    fixed-bn: BN stays at its initial statistics. batch-bn: BN normalizes with each batch, its running statistics move.
    running-bn: BN normalizes with the running statistics as they move, which is the paper's text.
    random: Gaussian directions at the mean length that batch-bn gives, so that only the directions differ.
    """
    was_training = network.training
    network.eval()  # dropout and the like stay off
    for layer in _bn_layers(network):
        layer.train(mode in ("batch-bn", "random"))
    with running_bn(network) if mode == "running-bn" else nullcontext():
        for images, instance_ids in batches:
            # An image that fails is left out, so the ranks' parts may differ in length.
            rows = collectives.all_gather_uneven(classifier.group, network(images).float())
            instance_ids = collectives.all_gather_uneven(classifier.group, instance_ids)
            if mode == "running-bn":  # what follows is normalized with them, so they are the same everywhere
                average_statistics(network, classifier.group)
            if mode != "random":
                classifier.set_rows(instance_ids, rows)
            progress.batches += 1
            progress.rows += len(rows)
            progress.lengths += float(rows.norm(dim=1).cpu().double().sum())  # MPS has no float64
    network.train(was_training)
    length = row_norm or (progress.mean_length if mode == "random" else None)
    if length is not None:
        for part in classifier.weight.split(1 << 16):  # a copy of all would not fit where the rows just do
            part.copy_(length * F.normalize(part.float()))
    return row_norm or progress.mean_length


@contextmanager
def running_bn(network: nn.Module) -> Iterator[None]:
    """Within it, BN layers in eval mode first move their running statistics by the batch, then normalize with them."""

    def move_statistics(bn: nn.Module, inputs: tuple[Tensor]) -> None:
        bn.train()
        type(bn).forward(bn, inputs[0])  # as any kind of BN layer does it, without this hook
        bn.eval()

    hooks = [layer.register_forward_pre_hook(move_statistics) for layer in _bn_layers(network)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _bn_layers(network: nn.Module) -> list[_BatchNorm]:
    """Those whose statistics move."""
    layers = [layer for layer in network.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    return [layer for layer in layers if layer not in getattr(network, "fixed_bn", ())]

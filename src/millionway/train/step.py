"""One step: the method on one screen."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from millionway.model.classifier import InstanceClassifier
from millionway.model.network import buffers_kept
from millionway.model.pair_loss import pair_loss
from millionway.parallel.group import while_gradients_travel, without_gradient_sync
from millionway.train.clock import Clock


@dataclass(frozen=True)
class StepResult:
    loss: Tensor
    num_ahead: Tensor | None
    """how many other classes score as high as a view's own, by the rows as they were before the update; if asked for"""


def train_step(
    network: nn.Module,
    classifier: InstanceClassifier,
    optimizer: torch.optim.Optimizer,
    views: Float[Tensor, "views 3 size size"],
    instance_ids: Int[Tensor, " views"],
    hardest: Int[Tensor, "classes k"] | None,
    *,
    alpha: float,
    lr: float,
    row_lr: float,
    momentum: float,
    weight_decay: float,
    pairs: float = 0.0,
    num_classified: int | None = None,
    with_num_ahead: bool = False,
    views_at_once: int | None = None,
    clock: Clock | None = None,
) -> StepResult:
    """Tell every view's instance from all others; move encoder and head by the optimizer, rows by SGD.

    The views of an image are rows of the batch with the same class. `hardest` and `alpha` smooth the labels. pairs:
    weight of the second loss, in which these views find each other; the loss that is returned is without it.
    num_classified: how many of the views, the first ones, are told from all instances; by default all.
    views_at_once: encode that many at a time, twice, to save memory. clock: books the time of each part.

    What the ranks tell each other in a step: all_gather of the embeddings with their ids; with smoothing, all_reduce of
    the batch's hardest classes; all_reduce of Z and numerators; reduce_scatter of the embedding gradients; and DDP's
    all_reduce of the encoder's gradients. Below a temperature of 0.05 one more all_reduce, of the largest logits; with
    pairs, all_gather and reduce_scatter of the embeddings once more.
    `update` needs none of them: rows move while the encoder's gradients travel.
    """
    lap = clock.lap if clock is not None else lambda part: None
    parts = views.split(views_at_once or len(views))
    with torch.set_grad_enabled(len(parts) == 1):
        embeddings = network(views) if len(parts) == 1 else _encode(network, parts)
    embeddings.requires_grad_()
    lap("encoder")
    classified, classes = embeddings[:num_classified], instance_ids[:num_classified]
    loss = total = classifier(classified, classes, hardest, alpha)
    if pairs:
        total = loss + pairs * pair_loss(embeddings, instance_ids, classifier.temperature, classifier.group)
    lap("classifier")
    num_ahead = classifier.num_ahead(classified, classes) if with_num_ahead else None
    lap("logging")

    for parameters in optimizer.param_groups:
        parameters["lr"] = lr * parameters.get("multiple", 1.0)
    optimizer.zero_grad(set_to_none=True)

    def move_rows() -> None:
        lap("encoder")
        classifier.update(row_lr, momentum, weight_decay)
        lap("classifier")

    with while_gradients_travel(network, move_rows):
        # The loss is the mean over all ranks' views; averaging gradients over ranks would divide by their number again.
        (classifier.group.size * total).backward()
        if len(parts) > 1 and any(parameter.requires_grad for parameter in network.parameters()):
            assert embeddings.grad is not None
            _encode_again(network, parts, embeddings.grad)
    optimizer.step()
    lap("encoder")
    return StepResult(loss.detach(), num_ahead)


def _encode(network: nn.Module, parts: tuple[Tensor, ...]) -> Tensor:
    """Embeddings of all parts; BN statistics stay as they were, because `_encode_again` moves them."""
    seed = torch.initial_seed()
    embeddings = []
    with buffers_kept(network):
        for number, part in enumerate(parts):
            torch.manual_seed(seed + number)  # dropout must do the same the second time
            embeddings.append(network(part))
    return torch.cat(embeddings)


def _encode_again(network: nn.Module, parts: tuple[Tensor, ...], gradient: Tensor) -> None:
    """The same with a graph, backward part by part; ranks talk at the last one only."""
    seed = torch.initial_seed() - (len(parts) - 1)
    for number, (part, part_gradient) in enumerate(zip(parts, gradient.split(len(parts[0])))):
        torch.manual_seed(seed + number)
        with nullcontext() if number == len(parts) - 1 else without_gradient_sync(network):
            network(part).backward(part_gradient)

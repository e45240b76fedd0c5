"""Linear classifier on frozen features: L2-normalized, SGD, cosine, no weight decay (the paper's settings)."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from millionway import randomness
from millionway.evaluation.features import draw_of_each

BATCH_SIZE = 2048
LR = 40.0  # at batch 2048; smaller batches scale it linearly
MOMENTUM = 0.9
MIN_STEPS_PER_EPOCH = 16  # small sets get a smaller batch, so that 100 epochs are enough steps
SWEEP = (0.1, 0.3, 1.0, 3.0, 10.0)  # times the learning rate
HELD_OUT = 0.1  # of the training images, for the sweep


@dataclass(frozen=True)
class Fit:
    """How the classifier is trained."""

    epochs: int
    batch_size: int
    lr: float
    weight_decay: float

    @staticmethod
    def for_images(
        num: int,
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        weight_decay: float | None = None,
    ) -> "Fit":
        """The paper's values where nothing is given."""
        size = batch_size or max(1, min(BATCH_SIZE, num // MIN_STEPS_PER_EPOCH))
        return Fit(epochs or 100, min(size, num), lr or LR * size / BATCH_SIZE, weight_decay or 0.0)


def linear(
    train: Float[Tensor, "train features"],
    train_labels: Int[Tensor, " train"],
    test: Float[Tensor, "test features"],
    test_labels: Int[Tensor, " test"],
    seed: int = 0,
    how: Fit | None = None,
    features_of_epoch: Callable[[int], Tensor] | None = None,
) -> Iterator[tuple[str, float]]:
    """Top-1 accuracy, and top-5 where there are more than five labels.

    features_of_epoch: other features of the same training images in each epoch, from random views.
    """
    how = how or Fit.for_images(len(train))
    num_labels = int(torch.cat([train_labels, test_labels]).max()) + 1
    weight, bias = fit(features_of_epoch or (lambda epoch: train), train_labels, num_labels, how, seed)
    for k in (1, 5):
        if k < num_labels:
            yield f"linear_top{k}", accuracy(weight, bias, test, test_labels, k)


def accuracy(weight: Tensor, bias: Tensor, features: Tensor, labels: Tensor, k: int = 1) -> float:
    scores = F.normalize(features) @ weight.T + bias
    return float((scores.topk(k, dim=1).indices == labels[:, None]).any(dim=1).float().mean())


def choose_lr(features: Tensor, labels: Tensor, how: Fit, seed: int) -> tuple[float, dict[str, float]]:
    """(learning rate, accuracies by learning rate) on a held-out tenth of the training images."""
    key = randomness.key_of(seed, "linear sweep")
    held_out = draw_of_each(labels, torch.arange(len(labels)), key, lambda label, num: round(HELD_OUT * num))
    if not bool(held_out.any()) or bool(held_out.all()):
        raise ValueError("--sweep needs at least five images of a class")
    num_labels, reached = int(labels.max()) + 1, {}
    inside = features[~held_out]
    for factor in SWEEP:
        one = replace(how, lr=factor * how.lr, batch_size=min(how.batch_size, len(inside)))
        weight, bias = fit(lambda epoch: inside, labels[~held_out], num_labels, one, seed)
        reached[one.lr] = accuracy(weight, bias, features[held_out], labels[held_out])
    best = max(reached, key=lambda lr: reached[lr])
    return best, {f"{lr:g}": value for lr, value in reached.items()}


@torch.no_grad()
def fit(
    features_of_epoch: Callable[[int], Tensor], labels: Tensor, num_labels: int, how: Fit, seed: int
) -> tuple[Tensor, Tensor]:
    """(weight [labels, features], bias [labels]). The gradient of softmax regression is written out: it is faster."""
    steps_per_epoch = len(labels) // how.batch_size
    features = features_of_epoch(0)
    unit = F.normalize(features)
    weight, bias = unit.new_zeros(num_labels, unit.shape[1]), unit.new_zeros(num_labels)
    weight_momentum, bias_momentum = torch.zeros_like(weight), torch.zeros_like(bias)
    targets = F.one_hot(labels, num_labels).to(unit.dtype)
    for epoch in range(how.epochs):
        now = features if epoch == 0 else features_of_epoch(epoch)
        if now is not features:
            features, unit = now, F.normalize(now)
        order = torch.randperm(len(labels), generator=randomness.generator(seed, "linear", epoch))
        for step in range(steps_per_epoch):
            done = (epoch * steps_per_epoch + step) / (how.epochs * steps_per_epoch)
            lr = how.lr * 0.5 * (1 + math.cos(math.pi * done))
            chosen = order[step * how.batch_size : (step + 1) * how.batch_size]
            x = torch.index_select(unit, 0, chosen)
            error = torch.addmm(bias, x, weight.T).softmax(dim=1)  # [batch, labels]
            error.sub_(torch.index_select(targets, 0, chosen)).div_(how.batch_size)
            # The bias is not penalized, as usual.
            weight_momentum.mul_(MOMENTUM).addmm_(error.T, x).add_(weight, alpha=how.weight_decay)
            bias_momentum.mul_(MOMENTUM).add_(error.sum(dim=0))
            weight.sub_(weight_momentum, alpha=lr)
            bias.sub_(bias_momentum, alpha=lr)
    return weight, bias

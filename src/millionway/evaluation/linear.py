"""Linear classifier on frozen features: L2-normalized, SGD, cosine, no weight decay (the paper's settings)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from millionway import randomness
from millionway.console import track
from millionway.data.readers import Progress
from millionway.evaluation.features import draw_of_each, encode_views
from millionway.evaluation.work import Work
from millionway.model.schedule import learning_rate

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


def score(work: Work) -> Iterator[tuple[str, float]]:
    features, asked = work.features, work.asked
    how = Fit.for_images(len(features.bank), asked.epochs, asked.batch_size, asked.lr, asked.weight_decay)
    if asked.sweep:
        lr, reached = choose_lr(features.bank, features.bank_labels, how, work.seed, track)
        work.used["accuracy_on_held_out_by_lr"] = reached
        how = replace(how, lr=lr)
    work.used.update(vars(how), momentum=MOMENTUM, augment=asked.augment)
    of_epoch = (lambda epoch: _random_view_features(work, epoch)) if asked.augment else None
    yield from linear(*features, work.seed, how, of_epoch, track)


def _random_view_features(work: Work, epoch: int) -> tuple[Tensor, Tensor]:
    """(features, labels) of one random crop, perhaps mirrored, of every training image."""
    bank = work.split.bank
    keys = [randomness.key_of(work.seed, "linear view", epoch)]
    (features,), ids = encode_views(
        work.subject.encoder, bank.dataset, bank.instance_ids, keys, work.device, work.asked.crops
    )
    return features.to(work.device), bank.labels_of(ids).to(work.device)


def linear(
    train: Float[Tensor, "train features"],
    train_labels: Int[Tensor, " train"],
    test: Float[Tensor, "test features"],
    test_labels: Int[Tensor, " test"],
    seed: int = 0,
    how: Fit | None = None,
    of_epoch: Callable[[int], tuple[Tensor, Tensor]] | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[str, float]]:
    """Top-1 accuracy, and top-5 where there are more than five labels.

    of_epoch: other (features, labels) to train on in each epoch, as many as `train`: of random views.
    """
    how = how or Fit.for_images(len(train))
    num_labels = int(torch.cat([train_labels, test_labels]).max()) + 1
    weight, bias = fit(of_epoch or (lambda epoch: (train, train_labels)), num_labels, how, seed, progress)
    if not bool(weight.isfinite().all()):
        raise ValueError(f"linear: the weights grew beyond all numbers at --lr {how.lr:g}; use a lower one")
    for k in (1, 5):
        if k < num_labels:
            yield f"linear_top{k}", accuracy(weight, bias, test, test_labels, k)


def accuracy(weight: Tensor, bias: Tensor, features: Tensor, labels: Tensor, k: int = 1) -> float:
    scores = F.normalize(features) @ weight.T + bias
    return float((scores.topk(k, dim=1).indices == labels[:, None]).any(dim=1).float().mean())


def choose_lr(
    features: Tensor, labels: Tensor, how: Fit, seed: int, progress: Progress | None = None
) -> tuple[float, dict[str, float]]:
    """(learning rate, accuracies by learning rate) on a held-out tenth of the training images."""
    key = randomness.key_of(seed, "linear sweep")
    held_out = draw_of_each(labels.cpu(), torch.arange(len(labels)), key, lambda label, num: round(HELD_OUT * num))
    held_out = held_out.to(labels.device)
    if not bool(held_out.any()) or bool(held_out.all()):
        raise ValueError("--sweep needs at least six images of a class")
    num_labels, reached = int(labels.max()) + 1, {}
    inside = features[~held_out], labels[~held_out]
    for factor in SWEEP:
        one = replace(how, lr=factor * how.lr, batch_size=min(how.batch_size, len(inside[0])))
        weight, bias = fit(lambda epoch: inside, num_labels, one, seed, progress)
        finite = bool(weight.isfinite().all())
        reached[one.lr] = accuracy(weight, bias, features[held_out], labels[held_out]) if finite else 0.0
    best = max(reached, key=lambda lr: reached[lr])
    return best, {f"{lr:g}": value for lr, value in reached.items()}


@torch.no_grad()
def fit(
    of_epoch: Callable[[int], tuple[Tensor, Tensor]],
    num_labels: int,
    how: Fit,
    seed: int,
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """(weight [labels, features], bias [labels]). The gradient of softmax regression is written out: it is faster."""
    features, labels = of_epoch(0)
    steps_per_epoch = len(labels) // how.batch_size
    unit = F.normalize(features)
    weight, bias = unit.new_zeros(num_labels, unit.shape[1]), unit.new_zeros(num_labels)
    weight_momentum, bias_momentum = torch.zeros_like(weight), torch.zeros_like(bias)
    minus_one = unit.new_full((how.batch_size, 1), -1.0)
    epochs = range(how.epochs)
    for epoch in epochs if progress is None else progress(epochs, how.epochs, "linear classifier"):
        now, labels = (features, labels) if epoch == 0 else of_epoch(epoch)
        if now is not features:
            features, unit = now, F.normalize(now)
        order = torch.randperm(len(labels), generator=randomness.generator(seed, "linear", epoch)).to(labels.device)
        for step in range(steps_per_epoch):
            lr = learning_rate(epoch * steps_per_epoch + step, how.epochs * steps_per_epoch, 0, how.lr)
            chosen = order[step * how.batch_size : (step + 1) * how.batch_size]
            x = torch.index_select(unit, 0, chosen)
            error = torch.addmm(bias, x, weight.T).softmax(dim=1)  # [batch, labels]
            error.scatter_add_(1, labels[chosen][:, None], minus_one).div_(how.batch_size)
            # The bias is not penalized, as usual.
            weight_momentum.mul_(MOMENTUM).addmm_(error.T, x).add_(weight, alpha=how.weight_decay)
            bias_momentum.mul_(MOMENTUM).add_(error.sum(dim=0))
            weight.sub_(weight_momentum, alpha=lr)
            bias.sub_(bias_momentum, alpha=lr)
    return weight, bias

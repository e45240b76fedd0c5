"""Linear classifier on frozen features: L2-normalized, SGD, cosine, no weight decay (the paper's settings)."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from millionway import randomness

EPOCHS = 100
BATCH_SIZE = 2048
LR = 40.0  # at batch 2048; smaller batches scale it linearly
MOMENTUM = 0.9
MIN_STEPS_PER_EPOCH = 16  # small sets get a smaller batch, so that 100 epochs are enough steps


def linear(
    train: Float[Tensor, "train features"],
    train_labels: Int[Tensor, " train"],
    test: Float[Tensor, "test features"],
    test_labels: Int[Tensor, " test"],
    seed: int = 0,
) -> Iterator[tuple[str, float]]:
    """Top-1 accuracy, and top-5 where there are more than five labels."""
    num_labels = int(torch.cat([train_labels, test_labels]).max()) + 1
    weight, bias = fit(F.normalize(train), train_labels, num_labels, seed)
    scores = F.normalize(test) @ weight.T + bias
    for k in (1, 5):
        if k < num_labels:
            hits = (scores.topk(k, dim=1).indices == test_labels[:, None]).any(dim=1)
            yield f"linear_top{k}", float(hits.float().mean())


def batch_size_for(num_images: int) -> int:
    return max(1, min(BATCH_SIZE, num_images // MIN_STEPS_PER_EPOCH))


def fit(features: Tensor, labels: Tensor, num_labels: int, seed: int) -> tuple[Tensor, Tensor]:
    """(weight [labels, features], bias [labels]) after 100 epochs."""
    batch_size = batch_size_for(len(features))
    peak = LR * batch_size / BATCH_SIZE
    weight = torch.zeros(num_labels, features.shape[1], requires_grad=True)
    bias = torch.zeros(num_labels, requires_grad=True)
    optimizer = torch.optim.SGD([weight, bias], lr=peak, momentum=MOMENTUM)
    steps_per_epoch = len(features) // batch_size
    for epoch in range(EPOCHS):
        order = torch.randperm(len(features), generator=randomness.generator(seed, "linear", epoch))
        for step in range(steps_per_epoch):
            done = (epoch * steps_per_epoch + step) / (EPOCHS * steps_per_epoch)
            optimizer.param_groups[0]["lr"] = peak * 0.5 * (1 + math.cos(math.pi * done))
            chosen = order[step * batch_size : (step + 1) * batch_size]
            loss = F.cross_entropy(features[chosen] @ weight.T + bias, labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weight.detach(), bias.detach()

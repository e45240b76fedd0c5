"""Training of the whole encoder with labels: what few-labels and finetune share."""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from millionway import randomness
from millionway.console import track
from millionway.data.batches import plain_batches, view_batches
from millionway.evaluation.features import Labeled
from millionway.evaluation.work import Work
from millionway.model.schedule import learning_rate

MOMENTUM = 0.9
EVAL_BATCH = 256


@dataclass(frozen=True)
class Recipe:
    """How it is trained: SGD with momentum, cosine to 0, random resized crop and flip."""

    epochs: int
    batch_size: int
    encoder_lr: float
    classifier_lr: float
    weight_decay: float
    normalize: bool
    """features to length 1 before the classifier"""
    crop_min: float
    flip: float


class Classified(nn.Module):
    """Encoder and a linear classifier that starts at zero."""

    def __init__(self, encoder: nn.Module, feature_dim: int, num_labels: int, normalize: bool) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(feature_dim, num_labels)
        self.normalize = normalize
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: Tensor) -> Tensor:
        features = self.encoder(images)
        return self.classifier(F.normalize(features) if self.normalize else features)


def train(work: Work, part: Labeled, recipe: Recipe, what: str) -> Classified:
    """A trained copy; the encoder that is scored stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.key_of(work.seed, f"dropout {what}"))
        return _train(work, part, recipe, what)


def _train(work: Work, part: Labeled, recipe: Recipe, what: str) -> Classified:
    encoder = work.subject.encoder
    model = Classified(copy.deepcopy(encoder), encoder.feature_dim, work.num_labels, recipe.normalize)
    model = model.to(work.device).train()
    optimizer = torch.optim.SGD(
        [
            {"params": list(model.encoder.parameters()), "peak": recipe.encoder_lr},
            {"params": list(model.classifier.parameters()), "peak": recipe.classifier_lr},
        ],
        lr=0.0,
        momentum=MOMENTUM,
        weight_decay=recipe.weight_decay,
    )
    ids = part.instance_ids
    steps_per_epoch = max(1, len(ids) // recipe.batch_size)
    num_steps = recipe.epochs * steps_per_epoch
    batches = [
        ([randomness.key_of(work.seed, what, epoch)], batch)
        for epoch in range(recipe.epochs)
        for batch in _batches(ids, recipe.batch_size, steps_per_epoch, work.seed, what, epoch)
    ]
    views = view_batches(
        part.dataset.store,
        batches,
        encoder.spec.image_size,
        work.device,
        **work.asked.crops,
    )
    for step, (images, read_ids) in enumerate(track(views, num_steps, what)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps, 0, group["peak"])
        loss = F.cross_entropy(model(images).float(), part.labels_of(read_ids.cpu()).to(work.device))
        if not bool(torch.isfinite(loss)):
            raise ValueError(f"{what}: the loss is not finite at step {step + 1}; use a lower --lr")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def _batches(ids: Tensor, size: int, num: int, seed: int, what: str, epoch: int) -> list[Tensor]:
    """Full batches of an epoch: BN should not see a batch of one."""
    order = torch.randperm(len(ids), generator=randomness.generator(seed, what, epoch))
    return [ids[order[n * size : (n + 1) * size]] for n in range(num)]


@torch.no_grad()
def top_k_accuracy(work: Work, model: Classified, part: Labeled) -> dict[int, float]:
    """Share of images whose label is among the first k; k = 5 only where there are more labels."""
    size = work.subject.encoder.spec.image_size
    hits, num = {k: 0 for k in (1, 5) if k < work.num_labels}, 0
    for images, ids in plain_batches(part.dataset.store, part.instance_ids, size, EVAL_BATCH, work.device):
        scores = model(images).float().cpu()
        labels = part.labels_of(ids.cpu())
        num += len(labels)
        for k in hits:
            hits[k] += int((scores.topk(k, dim=1).indices == labels[:, None]).sum())
    return {k: hit / num for k, hit in hits.items()}

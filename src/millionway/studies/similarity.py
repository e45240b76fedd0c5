"""What the rows know before any training: cosines within and between instances, and retrieval by the rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from millionway import randomness
from millionway.config import Pretrain
from millionway.data.dataset import Dataset
from millionway.data.loader import plain_batches, view_batches
from millionway.data.sampler import Sampler
from millionway.data.workers import Progress
from millionway.model.prior import PriorProgress, write_prior
from millionway.parallel.group import Group
from millionway.train.setup import build, resolve


@torch.no_grad()
def prior_similarity(
    config: Pretrain, dataset: Dataset, prior: str, device: torch.device, progress: Progress
) -> dict[str, float]:
    """Rows by the prior, then one random view of every image through the same untrained network.

    intra: mean cosine of a view with the row of its image. inter: with all other rows. Views see BN as the prior's pass
    did (fixed-bn: initial statistics; else those of the batch); `_training`: as the first step of training will.
    retrieval: how often the nearest other row is of the same class.
    """
    group = Group.current()
    config = resolve(config, dataset, device, group)
    state, spec = build(config, dataset, device, group)
    training, network = config.training, state.network
    assert training.batch_size
    sampler = Sampler(dataset.instance_ids, training.batch_size, training.seed)
    batches = sampler.pass_over_all()
    images = plain_batches(dataset.store, torch.cat(batches), spec.image_size, training.batch_size, device)
    images = progress(images, len(batches), f"{prior}, seed {training.seed}: rows")
    write_prior(prior, network, state.classifier, images, 1.0, PriorProgress())

    keys = [randomness.key_of(training.seed, "view", 0, 0)]
    views = view_batches(
        dataset.store, [(keys, ids) for ids in batches], spec.image_size, device, **config.views.augmentation
    )
    in_mode, in_training = _Cosines(state.classifier.weight), _Cosines(state.classifier.weight)
    for part, ids in progress(views, len(batches), f"{prior}, seed {training.seed}: views"):
        for cosines, train_mode in ((in_mode, prior != "fixed-bn"), (in_training, True)):
            network.train(train_mode)
            cosines.add(network(part).float(), ids)
    numbers = {**in_mode.means(), **{f"{name}_training": value for name, value in in_training.means().items()}}
    if dataset.labels is not None:
        labels = torch.from_numpy(dataset.labels.ids)
        nearest = state.classifier.hardest(1)[:, 0].long().cpu()
        known = dataset.instance_ids[labels[dataset.instance_ids] >= 0]
        numbers["retrieval"] = float((labels[nearest[known]] == labels[known]).float().mean())
        shares = torch.bincount(labels[known]).double() / len(known)
        numbers["retrieval_by_chance"] = float((shares * shares).sum())
    return numbers


class _Cosines:
    """Sums of cosines of views with their own row and with all others."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = F.normalize(rows.float())
        self.total = self.rows.sum(dim=0, dtype=torch.float64)
        self.intra = self.inter = 0.0
        self.num = 0

    def add(self, embeddings: Tensor, ids: Tensor) -> None:
        unit = F.normalize(embeddings)
        own = (unit * self.rows[ids]).sum(dim=1, dtype=torch.float64)
        others = (unit.double() @ self.total - own) / (len(self.rows) - 1)
        self.intra += float(own.sum())
        self.inter += float(others.sum())
        self.num += len(unit)

    def means(self) -> dict[str, float]:
        intra, inter = self.intra / self.num, self.inter / self.num
        return {"intra": intra, "inter": inter, "gap": intra - inter}

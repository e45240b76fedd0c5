"""What the rows know before any training: cosines within and between instances, and retrieval by the rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from millionway.data.batches import plain_batches, view_batches
from millionway.data.dataset import Dataset
from millionway.data.readers import Progress
from millionway.data.sampler import Sampler
from millionway.data.views import view_keys
from millionway.model.prior import PriorProgress, write_prior
from millionway.parallel.group import Group
from millionway.settings.pretrain import Pretrain
from millionway.train.setup import build, resolve


@torch.no_grad()
def prior_similarity(
    config: Pretrain, dataset: Dataset, prior: str, device: torch.device, progress: Progress
) -> dict[str, float]:
    """Rows by the prior, then one random view of every image through the same untrained network.

    intra: mean cosine of a view with the row of its image. inter: with all other rows. fixed-bn: views see BN's initial
    statistics; running-bn: those that the pass left; else those of their batch. `_training`: as the first step of
    training will, with those of the batch.
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

    keys = view_keys(training.seed, 0, 1)
    numbers = {}
    # Normalizing with a batch moves the running statistics, so it comes last.
    for ending, by_batch in (("", prior not in ("fixed-bn", "running-bn")), ("_training", True)):
        network.train(by_batch)
        cosines = _Cosines(state.classifier.weight, dataset.instance_ids)
        views = view_batches(
            dataset.store, [(keys, ids) for ids in batches], spec.image_size, device, **config.augmentation.of_a_view
        )
        for part, ids in progress(views, len(batches), f"{prior}, seed {training.seed}: views"):
            cosines.add(network(part).float(), ids)
        numbers |= {name + ending: value for name, value in cosines.means().items()}
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

    def __init__(self, rows: Tensor, instance_ids: Tensor) -> None:
        """instance_ids: those that have an image."""
        # On the CPU, because MPS has no float64.
        self.rows, self.num_rows = F.normalize(rows.float().cpu()), len(instance_ids)
        self.total = self.rows[instance_ids].sum(dim=0, dtype=torch.float64)
        self.intra = self.inter = 0.0
        self.num = 0

    def add(self, embeddings: Tensor, ids: Tensor) -> None:
        unit, ids = F.normalize(embeddings.cpu()), ids.cpu()
        own = (unit * self.rows[ids]).sum(dim=1, dtype=torch.float64)
        others = (unit.double() @ self.total - own) / (self.num_rows - 1)
        self.intra += float(own.sum())
        self.inter += float(others.sum())
        self.num += len(unit)

    def means(self) -> dict[str, float]:
        intra, inter = self.intra / self.num, self.inter / self.num
        return {"intra": intra, "inter": inter, "gap": intra - inter}

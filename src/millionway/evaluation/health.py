"""Is it learning? Numbers that need no labels."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from millionway import randomness
from millionway.evaluation.features import encode_views
from millionway.evaluation.work import Work
from millionway.model.classifier import InstanceClassifier
from millionway.parallel.collectives import all_gather_together
from millionway.reporting.metrics import read_metrics
from millionway.reporting.verdict import verdict
from millionway.settings.stored import run_settings

NUM_IMAGES = 2048
OF_THE_RUN = ("instance_top1", "instance_top5", "positive_cosine", "hardest_negative_cosine")


def score(work: Work) -> Iterator[tuple[str, float]]:
    """From two random views of up to 2,048 images; a run's last evaluation adds how its rows know its own images."""
    dataset, run = work.images.train, work.subject.run
    views_of = run or work.subject.beside
    config = run_settings(views_of) if views_of is not None and (views_of / "config.json").is_file() else None
    augmentation = work.asked.crops if config is None else config.augmentation.of_a_view
    work.used |= {"views_of_images": NUM_IMAGES, "views": augmentation}
    order = torch.randperm(len(dataset.instance_ids), generator=randomness.generator(work.seed, "health"))
    ids = dataset.instance_ids[order[:NUM_IMAGES]]
    keys = [randomness.key_of(work.seed, "health", view) for view in (0, 1)]
    (one, other), _ = encode_views(work.subject.encoder, dataset, ids, keys, work.device, augmentation)
    yield "effective_rank", effective_rank(one)
    yield "alignment", alignment(one, other)
    yield "uniformity", uniformity(one)
    if run is not None:
        lines = read_metrics(run / "metrics.jsonl")
        work.words["verdict"] = str(verdict(lines, config and config.training.epochs))
        evaluations = [line for line in lines if line["kind"] == "evaluation"]
        if evaluations and work.images.manifest is not None:
            yield from ((name, evaluations[-1][name]) for name in OF_THE_RUN)


@torch.no_grad()
def health_of_rows(
    classifier: InstanceClassifier,
    features: Float[Tensor, "views features"],
    embeddings: Float[Tensor, "views dim"],
    instance_ids: Int[Tensor, " views"],
) -> Iterator[tuple[str, float]]:
    """From fresh random views of some instances, network in eval mode; each rank brings its own, equally many.

    instance_top1, instance_top5: how often a view finds its own row. effective_rank: RankMe of the features; it falls
    towards 1 in a collapse. positive_cosine: a view and its own row. hardest_negative_cosine: the nearest other row.
    """
    compared = classifier.compare(embeddings, instance_ids)
    ours = (compared.num_ahead, compared.own, compared.nearest_other, features)
    num_ahead, own, nearest_other, features = all_gather_together(classifier.group, *ours)
    yield "instance_top1", float((num_ahead < 1).float().mean())
    yield "instance_top5", float((num_ahead < 5).float().mean())
    yield "effective_rank", effective_rank(features)
    yield "positive_cosine", float(own.mean())
    yield "hardest_negative_cosine", float(nearest_other.mean())


def views_found(one: Float[Tensor, "images features"], other: Float[Tensor, "images features"]) -> float:
    """How often the nearest of all other views, by their cosine, is the second one of the same image."""
    cosines = F.normalize(one) @ F.normalize(other).T
    return float((cosines.argmax(dim=1) == torch.arange(len(one), device=one.device)).float().mean())


def effective_rank(features: Float[Tensor, "images features"]) -> float:
    """RankMe: exp of the entropy of the normalized singular values."""
    values = torch.linalg.svdvals(features.cpu().double())
    share = values / values.sum().clamp(min=1e-12) + 1e-12
    return float(torch.exp(-(share * share.log()).sum()))


def alignment(one: Float[Tensor, "images features"], other: Float[Tensor, "images features"]) -> float:
    """Mean squared distance of the unit features of two views of an image; 0 is perfect."""
    return float((F.normalize(one) - F.normalize(other)).square().sum(dim=1).mean())


def uniformity(features: Float[Tensor, "images features"]) -> float:
    """log of the mean of exp(-2 |a - b|^2) over pairs of unit features; 0 is a point, lower is more spread out."""
    distances = torch.pdist(F.normalize(features.cpu().double()))
    return float((-2 * distances.square()).exp().mean().log())

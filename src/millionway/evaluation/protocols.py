"""Score an encoder by a protocol; the numbers go into a file with all that led to them.

A protocol is a function of `Work` that yields (name, value), in a file of its own.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millionway import randomness
from millionway.config import from_json
from millionway.data.dataset import Dataset, open_dataset, open_test
from millionway.data.loader import view_batches
from millionway.evaluation import detect as detection
from millionway.evaluation import knn as knn_protocol
from millionway.evaluation import linear as linear_protocol
from millionway.evaluation.boxes import boxes_fingerprint, has_boxes, read_boxes
from millionway.evaluation.feature_cache import FeatureCache
from millionway.evaluation.features import BATCH_SIZE, Split, labelled_split, no_labels
from millionway.evaluation.few_labels import few_labels
from millionway.evaluation.finetune import finetune
from millionway.evaluation.health import alignment, effective_rank, uniformity
from millionway.evaluation.results import write_result
from millionway.evaluation.retrieval import retrieval
from millionway.evaluation.subject import Subject
from millionway.evaluation.work import Options, Progress, Work
from millionway.files import read_metrics
from millionway.intervals import half_interval
from millionway.model.encoder import Encoder
from millionway.names import suggest
from millionway.verdict import verdict

log = logging.getLogger("millionway")

HEALTH_IMAGES = 2048


def _knn(work: Work) -> Iterator[tuple[str, float]]:
    num_bank = len(work.split.bank.labels)
    work.used.update(k=[min(k, num_bank) for k in knn_protocol.NEIGHBORS], temperature=knn_protocol.TEMPERATURE)
    yield from knn_protocol.knn(*work.features)


def _linear(work: Work) -> Iterator[tuple[str, float]]:
    features, options = work.features, work.options
    how = linear_protocol.Fit.for_images(
        len(features.bank), options.epochs, options.batch_size, options.lr, options.weight_decay
    )
    if options.sweep:
        lr, reached = linear_protocol.choose_lr(features.bank, features.bank_labels, how, work.seed)
        work.used["accuracy_on_held_out_by_lr"] = reached
        how = replace(how, lr=lr)
    work.used.update(vars(how), momentum=linear_protocol.MOMENTUM, augment=options.augment)
    of_epoch = (lambda epoch: _random_view_features(work, epoch)) if options.augment else None
    yield from linear_protocol.linear(*features, seed=work.seed, how=how, features_of_epoch=of_epoch)


def _random_view_features(work: Work, epoch: int) -> Tensor:
    """Features of one random crop, perhaps mirrored, of every training image."""
    bank = work.split.bank
    keys = [randomness.key_of(work.seed, "linear view", epoch)]
    crops = work.options.crops
    return _encode_views(work.subject.encoder, bank.dataset, bank.instance_ids, keys, work.device, crops)[0]


@torch.no_grad()
def _encode_views(
    encoder: Encoder,
    dataset: Dataset,
    instance_ids: Tensor,
    keys: list[int],
    device: torch.device,
    augmentation: dict[str, float],
) -> list[Tensor]:
    """Features of random views, one tensor for each key, on the CPU."""
    batches = [(keys, ids) for ids in instance_ids.split(BATCH_SIZE)]
    views = view_batches(dataset.store, batches, encoder.spec.image_size, device, **augmentation)
    parts = [encoder(images).float().cpu().chunk(len(keys)) for images, _ in views]
    return [torch.cat(each) for each in zip(*parts)]


def _retrieval(work: Work) -> Iterator[tuple[str, float]]:
    """Among the images that ask: those of a test split were not trained on."""
    yield from retrieval(work.features.queries, work.features.query_labels)


PROTOCOLS: dict[str, Callable[[Work], Iterator[tuple[str, float]]]] = {
    "knn": _knn,
    "linear": _linear,
    "few-labels": few_labels,
    "finetune": finetune,
    "retrieval": _retrieval,
}


def evaluate(
    protocol: str,
    subject: Subject,
    data: str,
    test_data: str | None = None,
    *,
    out: Path | None = None,
    data_root: Path | None = None,
    manifest: Path | None = None,
    max_images: int | None = None,
    max_unreadable: float = 0.01,
    seeds: tuple[int, ...] = (0,),
    options: Options | None = None,
    cache: FeatureCache | None = None,
    num_threads: int = 2,
    device: torch.device,
    progress: Progress | None = None,
) -> dict[str, dict[str, Any]]:
    """{protocol: numbers}; `all` is every one that the data allows.

    Queries: test_data, the data's own test split, or a held-out fifth of each class. Files go to `out`/PROTOCOL.json.
    """
    known = [*PROTOCOLS, "detect", "health", "all"]
    if protocol not in known:
        raise ValueError(f"evaluate {protocol}: no such protocol. {suggest(protocol, known)}")
    options = options or Options()
    options.check()
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds must be different numbers, not {' '.join(map(str, seeds))}")
    subject.encoder.to(device)
    if protocol == "detect" or (protocol == "all" and has_boxes(Path(data))):
        return {"detect": _detect(subject, data, test_data, out, seeds, options, num_threads, device, progress)}
    files: dict[str, Any] = {"num_threads": num_threads, "max_unreadable": max_unreadable, "progress": progress}
    train = open_dataset(data, data_root, manifest, max_images=max_images, **files)
    test = open_test(data, test_data, data_root, **files)
    results = {}
    if protocol in ("health", "all"):
        started = time.monotonic()
        lines = [] if subject.run is None else read_metrics(subject.run / "metrics.jsonl")
        words = {} if subject.run is None else {"verdict": str(verdict(lines))}
        summary = {"numbers": dict(_health(subject, train, lines, seeds[0], device, options)), **words}
        if out is not None:
            settings = {"data": data, "encoder": subject.name, "encoder_hash": subject.encoder_hash}
            settings |= {"data_fingerprint": train.manifest.fingerprint, "num_images": len(train.instance_ids)}
            write_result(out, "health", summary, settings, [seeds[0]], time.monotonic() - started)
        results["health"] = {**summary["numbers"], **words}
    if protocol == "health":
        return results
    for name in PROTOCOLS if protocol == "all" else [protocol]:
        started, numbers, works = time.monotonic(), [], []
        try:
            for seed in seeds:
                split = _split(name, train, test, seed, data)
                works.append(Work(subject, split, seed, device, options, progress, cache))
                numbers.append(dict(PROTOCOLS[name](works[-1])))
        except ValueError as error:
            if protocol != "all":
                raise
            log.warning("%s is left out: %s", name, error)
            continue
        split, used = works[-1].split, works[-1].used
        settings = {
            "data": data,
            "test_data": test_data,
            "num_bank": len(split.bank.labels),
            "num_queries": len(split.queries.labels),
            "num_labels": len(split.label_names),
            "chance": split.chance,
            "image_size": subject.encoder.spec.image_size,
            "encoder": subject.name,
            "encoder_hash": subject.encoder_hash,
            "data_fingerprint": train.manifest.fingerprint,
            **used,
        }
        summary = summarize(numbers)
        if out is not None:
            write_result(out, name, summary, settings, list(seeds), time.monotonic() - started)
        results[name] = {**summary["numbers"], "chance": split.chance}
    return results


def _health(
    subject: Subject, dataset: Dataset, lines: list[dict], seed: int, device: torch.device, options: Options
) -> Iterator[tuple[str, float]]:
    """Numbers that need no labels, from two random views of up to 2,048 images; a run's `lines` add its last ones."""
    order = torch.randperm(len(dataset.instance_ids), generator=randomness.generator(seed, "health"))
    ids = dataset.instance_ids[order[:HEALTH_IMAGES]]
    keys = [randomness.key_of(seed, "health", view) for view in (0, 1)]
    one, other = _encode_views(subject.encoder, dataset, ids, keys, device, _augmentation(subject, options))
    yield "effective_rank", effective_rank(one)
    yield "alignment", alignment(one, other)
    yield "uniformity", uniformity(one)
    for line in [line for line in lines if line["kind"] == "evaluation"][-1:]:
        for name in ("instance_top1", "instance_top5", "positive_cosine", "hardest_negative_cosine"):
            yield name, line[name]


def _augmentation(subject: Subject, options: Options) -> dict[str, float]:
    """The run's own views; for other encoders crops and mirror images."""
    if subject.run is not None and (subject.run / "config.json").is_file():
        return from_json((subject.run / "config.json").read_text()).views.augmentation
    return options.crops


def _detect(
    subject: Subject,
    data: str,
    test_data: str | None,
    out: Path | None,
    seeds: tuple[int, ...],
    options: Options,
    num_threads: int,
    device: torch.device,
    progress: Progress | None,
) -> dict[str, float]:
    """Test images: test_data, or another split of the data."""
    started, drop = time.monotonic(), options.bad_boxes == "drop"
    if test_data is None and Path(data).suffix == ".json":
        raise ValueError("detect: give the .json of the test images with --test-data")
    train_set = read_boxes(Path(data), options.train_split, drop_bad=drop)
    test_set = read_boxes(Path(test_data or data), options.test_split, train_set.names, drop)
    batch_size = options.batch_size or detection.BATCH_SIZE
    lr = options.lr or detection.LR * batch_size / detection.BATCH_SIZE
    recipe = detection.Recipe(options.detector, options.detect_size, options.iterations, batch_size, lr)
    how: dict[str, Any] = {"device": device, "num_threads": num_threads, "progress": progress}
    numbers = [
        dict(detection.detect(subject.encoder, train_set, test_set, recipe, out, seed=seed, **how)) for seed in seeds
    ]
    settings = {
        "data": data,
        "test_data": test_data,
        "splits": [options.train_split, options.test_split],
        "num_train": len(train_set.images),
        "num_test": len(test_set.images),
        "classes": train_set.names,
        "encoder": subject.name,
        "encoder_hash": subject.encoder_hash,
        "data_fingerprint": boxes_fingerprint(train_set, test_set),
        **vars(recipe),
    }
    summary = summarize(numbers)
    if out is not None:
        write_result(out, "detect", summary, settings, list(seeds), time.monotonic() - started)
    return summary["numbers"]


def _split(protocol: str, train: Dataset, test: Dataset | None, seed: int, data: str) -> Split:
    split = labelled_split(train, test, seed)
    if split is None:
        raise no_labels(f"evaluate {protocol}", data)
    missing = sorted(set(split.queries.labels.tolist()) - set(split.bank.labels.tolist()))
    if missing:
        names = ", ".join(split.label_names[label] for label in missing[:5])
        raise ValueError(f"evaluate {protocol}: {len(missing)} classes have no training image ({names})")
    return split


def summarize(numbers: list[dict[str, float]]) -> dict[str, Any]:
    """Means over the seeds; with several, also standard deviation, 95 % interval and each seed's own."""
    means = {name: statistics.mean(each[name] for each in numbers) for name in numbers[0]}
    if len(numbers) == 1:
        return {"numbers": means}
    each = {name: [one[name] for one in numbers] for name in means}
    return {
        "numbers": means,
        "standard_deviation": {name: statistics.stdev(values) for name, values in each.items()},
        "half_of_95_percent_interval": {name: half_interval(values) for name, values in each.items()},
        "per_seed": numbers,
    }

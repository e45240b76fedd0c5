"""Score an encoder by a protocol; the numbers go into a file with all that led to them.

A protocol is a function of `Work` that yields (name, value), in a file of its own.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millionway import randomness
from millionway.data.dataset import Dataset, open_dataset, open_test
from millionway.data.loader import view_batches
from millionway.evaluation import detect as detection
from millionway.evaluation import knn as knn_protocol
from millionway.evaluation import linear as linear_protocol
from millionway.evaluation.boxes import boxes_fingerprint, has_boxes, read_boxes
from millionway.evaluation.feature_cache import FeatureCache
from millionway.evaluation.features import Split, labelled_split
from millionway.evaluation.few_labels import few_labels
from millionway.evaluation.finetune import finetune
from millionway.evaluation.results import write_result
from millionway.evaluation.retrieval import retrieval
from millionway.evaluation.subject import Subject
from millionway.evaluation.work import Options, Progress, Work
from millionway.intervals import half_interval
from millionway.names import suggest

log = logging.getLogger("millionway")


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
        how = linear_protocol.replace(how, lr=lr)
    work.used.update(vars(how), momentum=linear_protocol.MOMENTUM, augment=options.augment)
    of_epoch = (lambda epoch: _random_view_features(work, epoch)) if options.augment else None
    yield from linear_protocol.linear(*features, seed=work.seed, how=how, features_of_epoch=of_epoch)


@torch.no_grad()
def _random_view_features(work: Work, epoch: int) -> Tensor:
    """Features of one random crop, perhaps mirrored, of every training image."""
    bank, size = work.split.bank, work.subject.encoder.spec.image_size
    keys = [randomness.key_of(work.seed, "linear view", epoch)]
    augmentation = {"crop_min": work.options.crop_min, "flip": work.options.flip}
    views = view_batches(
        bank.dataset.store,
        [(keys, ids) for ids in bank.instance_ids.split(256)],
        size,
        work.device,
        **augmentation,
        jitter=0.0,
        grayscale=0.0,
        blur=0.0,
    )
    return torch.cat([work.subject.encoder(images).float().cpu() for images, _ in views])


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
    known = [*PROTOCOLS, "detect", "all"]
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
        raise ValueError(
            f"evaluate {protocol}: {data} has no labels. They are the names of the folders directly below it "
            "(at least two), a `label` column of a .csv list, or those of a named set."
        )
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

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
from millionway.data.batches import view_batches
from millionway.data.dataset import Dataset, open_dataset, open_test
from millionway.evaluation import detect as detection
from millionway.evaluation import knn as knn_protocol
from millionway.evaluation import linear as linear_protocol
from millionway.evaluation.boxes import boxes_fingerprint, has_boxes, read_boxes
from millionway.evaluation.feature_cache import FeatureCache
from millionway.evaluation.features import BATCH_SIZE, Split, labeled_split, no_labels
from millionway.evaluation.few_labels import few_labels
from millionway.evaluation.finetune import finetune
from millionway.evaluation.health import alignment, effective_rank, uniformity
from millionway.evaluation.results import write_result, write_table
from millionway.evaluation.retrieval import retrieval
from millionway.evaluation.subject import Subject
from millionway.evaluation.work import Options, Progress, Work
from millionway.model.encoder import Encoder
from millionway.reporting.intervals import INTERVAL, half_interval
from millionway.reporting.metrics import read_metrics
from millionway.reporting.verdict import verdict
from millionway.settings.checks import suggest
from millionway.settings.pretrain import from_json

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
        lr, reached = linear_protocol.choose_lr(features.bank, features.bank_labels, how, work.seed, work.progress)
        work.used["accuracy_on_held_out_by_lr"] = reached
        how = replace(how, lr=lr)
    work.used.update(vars(how), momentum=linear_protocol.MOMENTUM, augment=options.augment)
    of_epoch = (lambda epoch: _random_view_features(work, epoch)) if options.augment else None
    yield from linear_protocol.linear(*features, work.seed, how, of_epoch, work.progress)


def _random_view_features(work: Work, epoch: int) -> tuple[Tensor, Tensor]:
    """(features, labels) of one random crop, perhaps mirrored, of every training image."""
    bank = work.split.bank
    keys = [randomness.key_of(work.seed, "linear view", epoch)]
    (features,), ids = _encode_views(
        work.subject.encoder, bank.dataset, bank.instance_ids, keys, work.device, work.options.crops
    )
    return features, bank.labels_of(ids)


@torch.no_grad()
def _encode_views(
    encoder: Encoder,
    dataset: Dataset,
    instance_ids: Tensor,
    keys: list[int],
    device: torch.device,
    augmentation: dict[str, float],
) -> tuple[list[Tensor], Tensor]:
    """(features of random views, one tensor for each key, instance ids), on the CPU.

    Another image takes the place of one that cannot be read, with its own id.
    """
    batches = [(keys, ids) for ids in instance_ids.split(BATCH_SIZE)]
    views = view_batches(dataset.store, batches, encoder.spec.image_size, device, **augmentation)
    parts = [(encoder(images).float().cpu().chunk(len(keys)), read_ids.cpu()) for images, read_ids in views]
    return [torch.cat(each) for each in zip(*(features for features, _ in parts))], torch.cat([i for _, i in parts])


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
    if protocol == "detect" or (protocol == "all" and has_boxes(Path(data))):
        return {"detect": _detect(subject, data, test_data, out, seeds, options, num_threads, device, progress)}
    files: dict[str, Any] = {"num_threads": num_threads, "max_unreadable": max_unreadable, "progress": progress}
    train = open_dataset(data, data_root, manifest, max_images=max_images, **files)
    test = open_test(data, test_data, data_root, **files)
    results = {}
    shared = {"data": data, "test_data": test_data, **subject.description}
    shared |= {"data_fingerprint": train.manifest.fingerprint, "num_images": len(train.instance_ids)}
    if test is not None:
        shared["test_fingerprint"] = test.manifest.fingerprint
    if protocol in ("health", "all"):
        started, augmentation = time.monotonic(), _augmentation(subject, options)
        lines = [] if subject.run is None else read_metrics(subject.run / "metrics.jsonl")
        words = {} if subject.run is None else {"verdict": str(verdict(lines, _epochs(subject.run)))}
        last = lines if manifest is not None else []  # numbers of the run's own images
        numbers = [dict(_health(subject.at(seed), train, last, seed, device, augmentation)) for seed in seeds]
        settings = {**shared, "views_of_images": HEALTH_IMAGES, "views": augmentation}
        summary = {**summarize(numbers), **words}
        if out is not None:
            write_result(out, "health", summary, settings, list(seeds), time.monotonic() - started)
        results["health"] = {**_returned(summary), **words}
    if protocol == "health":
        return results
    for name in PROTOCOLS if protocol == "all" else [protocol]:
        started, numbers, used = time.monotonic(), [], []
        try:
            for seed in seeds:
                split = _split(name, train, test, seed, data)
                work = Work(subject.at(seed), split, seed, device, options, progress, cache)
                numbers.append(dict(PROTOCOLS[name](work)))
                used.append({**work.used, "chance": split.chance, "num_bank": len(split.bank.labels)})
                used[-1] |= {"num_queries": len(split.queries.labels), "num_labels": work.num_labels}
        except ValueError as error:
            if protocol != "all":
                raise
            log.warning("%s is left out: %s", name, error)
            continue
        summary = summarize(numbers)
        if out is not None:
            settings = {**shared, **_in_common(used)}
            write_result(out, name, summary, settings, list(seeds), time.monotonic() - started)
        results[name] = {**_returned(summary), "chance": statistics.mean(each["chance"] for each in used)}
    if protocol == "all" and out is not None:
        write_table(out, results)
    return results


def _in_common(used: list[dict[str, Any]]) -> dict[str, Any]:
    """Settings that all seeds share, and under `settings_per_seed` those that they do not."""
    common = {name: value for name, value in used[0].items() if all(each.get(name) == value for each in used)}
    others = [{name: value for name, value in each.items() if name not in common} for each in used]
    return common | ({"settings_per_seed": others} if any(others) else {})


def _returned(summary: dict[str, Any]) -> dict[str, Any]:
    """Numbers, and with several seeds their intervals."""
    return {**summary["numbers"], **({INTERVAL: summary[INTERVAL]} if INTERVAL in summary else {})}


def _health(
    subject: Subject,
    dataset: Dataset,
    lines: list[dict],
    seed: int,
    device: torch.device,
    augmentation: dict[str, float],
) -> Iterator[tuple[str, float]]:
    """Numbers that need no labels, from two random views of up to 2,048 images; a run's `lines` add its last ones."""
    order = torch.randperm(len(dataset.instance_ids), generator=randomness.generator(seed, "health"))
    ids = dataset.instance_ids[order[:HEALTH_IMAGES]]
    keys = [randomness.key_of(seed, "health", view) for view in (0, 1)]
    (one, other), _ = _encode_views(subject.encoder.to(device), dataset, ids, keys, device, augmentation)
    yield "effective_rank", effective_rank(one)
    yield "alignment", alignment(one, other)
    yield "uniformity", uniformity(one)
    for line in [line for line in lines if line["kind"] == "evaluation"][-1:]:
        for name in ("instance_top1", "instance_top5", "positive_cosine", "hardest_negative_cosine"):
            yield name, line[name]


def _epochs(run: Path) -> int | None:
    """How many the run is to have, if its folder says so."""
    config = run / "config.json"
    return from_json(config.read_text()).training.epochs if config.is_file() else None


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
    decay = detection.WEIGHT_DECAY if options.weight_decay is None else options.weight_decay
    recipe = detection.Recipe(options.detector, options.detect_size, options.iterations, batch_size, lr, decay)
    how: dict[str, Any] = {"device": device, "num_threads": num_threads, "progress": progress}
    detection.check(train_set, test_set, num_threads, progress)
    numbers = [
        dict(detection.detect(subject.at(seed).encoder, train_set, test_set, recipe, out, seed=seed, **how))
        for seed in seeds
    ]
    settings = {
        "data": data,
        "test_data": test_data,
        **subject.description,
        "splits": [options.train_split, options.test_split],
        "num_train": len(train_set.images),
        "num_test": len(test_set.images),
        "classes": train_set.names,
        "data_fingerprint": boxes_fingerprint(train_set, test_set),
        **vars(recipe),
    }
    summary = summarize(numbers)
    if out is not None:
        write_result(out, "detect", summary, settings, list(seeds), time.monotonic() - started)
    return _returned(summary)


def _split(protocol: str, train: Dataset, test: Dataset | None, seed: int, data: str) -> Split:
    split = labeled_split(train, test, seed)
    if split is None and train.labels is not None and (test is None or test.labels is not None):
        raise ValueError(
            f"evaluate {protocol}: {data}: a fifth of each class is held out, which needs three images of a class at "
            "least; or give the images that ask with --test-data"
        )
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
        INTERVAL: {name: half_interval(values) for name, values in each.items()},
        "per_seed": numbers,
    }

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

from millionway.data.images import set_limits
from millionway.evaluation import detect, few_labels, finetune, health, knn, linear, retrieval
from millionway.evaluation.boxes import has_boxes
from millionway.evaluation.feature_cache import FeatureCache, default_folder
from millionway.evaluation.results import write_result, write_table
from millionway.evaluation.subject import Subject, open_subject
from millionway.evaluation.work import Images, Work
from millionway.machine import prepare
from millionway.reporting.intervals import INTERVAL, half_interval
from millionway.settings.checks import suggest
from millionway.settings.evaluate import Evaluate

log = logging.getLogger("millionway")

PROTOCOLS: dict[str, Callable[[Work], Iterator[tuple[str, float]]]] = {
    "health": health.score,
    "knn": knn.score,
    "linear": linear.score,
    "few-labels": few_labels.score,
    "finetune": finetune.score,
    "retrieval": retrieval.score,
    "detect": detect.score,
}
CHEAP = ("knn", "linear", "retrieval", "health")
"""they train no encoder"""


def evaluate(asked: Evaluate) -> dict[str, dict[str, Any]]:
    """{protocol: numbers}; `all` is every one that the data allows.

    Queries: test_data, the data's own test split, or a held-out fifth of each class. Files go to `out`/PROTOCOL.json.
    """
    known = [*PROTOCOLS, "all"]
    if asked.protocol not in known:
        raise ValueError(f"evaluate {asked.protocol}: no such protocol. {suggest(asked.protocol, known)}")
    set_limits(asked.max_pixels, asked.max_image_bytes)
    device, num_threads = prepare(asked.device, asked.threads)
    subject = open_subject(asked.run, asked.encoder, asked.weights, asked.image_size, asked.seed)
    others = {} if asked.untrained == "no" else subject.others(asked.seed)
    images = Images.of(asked, num_threads)
    out = asked.out or (None if subject.run is None else subject.run / "evaluation")
    results = {}
    for name in _chosen(asked.protocol, images.data):
        try:
            results[name] = _score(name, asked, images, subject, others if _compared(name, asked) else {}, device, out)
        except ValueError as error:
            if asked.protocol != "all":
                raise
            log.warning("%s is left out: %s", name, error)
    if asked.protocol == "all" and out is not None:
        write_table(out, results)
    return results


def _chosen(protocol: str, data: str) -> list[str]:
    """`all` is detection for images with boxes, and everything else for others."""
    if protocol != "all":
        return [protocol]
    return ["detect"] if has_boxes(Path(data)) else [name for name in PROTOCOLS if name != "detect"]


def _compared(protocol: str, asked: Evaluate) -> bool:
    """Whether other encoders are scored too."""
    return asked.untrained == "yes" or (protocol in CHEAP and not asked.augment)


def _score(
    name: str,
    asked: Evaluate,
    images: Images,
    subject: Subject,
    others: dict[str, Subject],
    device: torch.device,
    out: Path | None,
) -> dict[str, Any]:
    """One protocol with all seeds, written down. others: encoders that are scored beside this one."""
    started, seeds = time.monotonic(), list(range(asked.seed, asked.seed + asked.seeds))
    cache = FeatureCache(default_folder()) if asked.cache else None

    def work_of(subject: Subject, out: Path | None) -> Iterator[tuple[Work, dict[str, float]]]:
        for seed in seeds:
            work = Work(name, asked, images, subject.at(seed), seed, device, out, cache)
            yield work, dict(PROTOCOLS[name](work))

    done = list(work_of(subject, out))
    used, words, summary = [work.used for work, _ in done], done[-1][0].words, summarize([each for _, each in done])
    beside = {who: summarize([each for _, each in work_of(other, None)])["numbers"] for who, other in others.items()}
    if out is not None:
        settings = {**images.description(name == "detect"), **subject.description, **_in_common(used)}
        write_result(out, name, {**summary, **words, **beside}, settings, seeds, time.monotonic() - started)
    returned = {**summary["numbers"], **words, **beside}
    if INTERVAL in summary:
        returned[INTERVAL] = summary[INTERVAL]
    if "chance" in used[0]:
        returned["chance"] = statistics.mean(each["chance"] for each in used)
    return returned


def _in_common(used: list[dict[str, Any]]) -> dict[str, Any]:
    """Settings that all seeds share, and under `settings_per_seed` those that they do not."""
    common = {name: value for name, value in used[0].items() if all(each.get(name) == value for each in used)}
    others = [{name: value for name, value in each.items() if name not in common} for each in used]
    return common | ({"settings_per_seed": others} if any(others) else {})


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

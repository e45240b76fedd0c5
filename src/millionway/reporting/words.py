"""Numbers of a run in plain sentences, and what the numbers are called."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millionway.reporting.contents import Contents, Score
from millionway.reporting.intervals import shown
from millionway.reporting.verdict import first_like_last, verdict

PROTOCOLS = {
    "knn": "An image gets the label that most of its nearest neighbors by features have.",
    "linear": "A linear classifier is trained on the features; the encoder stays as it is.",
    "few-labels": "The whole encoder is trained with a small share of the labels.",
    "finetune": "The whole encoder is trained with all labels.",
    "retrieval": "How often the nearest other image has the same label.",
    "detect": "A detector is trained on the encoder; average precision of its boxes.",
    "health": "Numbers that need no labels.",
}
NAMES = {
    "knn_200": "k-NN, 200 neighbors",
    "knn_20": "k-NN, 20 neighbors",
    "instance_top1": "fresh views that find their own image",
    "instance_top5": "... among the first five",
    "effective_rank": "effective rank of features (how many directions they use)",
    "positive_cosine": "cosine of a view with its own row",
    "hardest_negative_cosine": "cosine of a view with the nearest other row",
    "alignment": "distance of two views of an image (0 is perfect)",
    "uniformity": "spread of features (lower is more)",
    "retrieval_map": "mean average precision",
}


def duration(seconds: float) -> str:
    """As people say it: 40 s, 12 min, 1 h 40, 3 days 4 h."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d}"
    return f"{minutes // 1440} days {minutes % 1440 // 60} h"


def name_of(number: str) -> str:
    return NAMES.get(number, number.replace("_", " "))


def scored(score: Score) -> dict[str, Any]:
    """A line of the table of scores."""
    return {
        "protocol": score.protocol,
        "about": PROTOCOLS.get(score.protocol, ""),
        "name": name_of(score.name),
        "value": shown(score.name, score.value, score.half_interval),
        "beside": {who: shown(score.name, value) for who, value in score.beside.items()},
        "chance": "" if score.chance is None else f"{score.chance:.1%}",
        "scored_on": score.scored_on,
    }


def setting(contents: Contents, group: str, name: str) -> Any:
    """None if the run's settings do not have it."""
    settings = contents.settings.get(group)
    return settings.get(name) if isinstance(settings, dict) else None


def facts(contents: Contents) -> list[str]:
    """3,000 images, 100 epochs, 1 h 40 of training."""
    parts = []
    num_images = next((int(line["num_images"]) for line in reversed(contents.lines) if "num_images" in line), None)
    if num_images is not None:
        parts.append(f"{num_images:,} images")
    epochs, done = setting(contents, "training", "epochs"), max([line["epoch"] for line in contents.lines], default=0)
    if isinstance(epochs, int):
        parts.append(f"{epochs:,} epochs" if done >= epochs else f"{done:.4g} of {epochs:,} epochs so far")
    seconds = sum(line.get("seconds", 0.0) for line in contents.of_kind("epoch"))
    if seconds:
        parts.append(f"{duration(seconds)} of training")
    return parts


def summary(contents: Contents) -> list[str]:
    """The first thing a reader sees: what was done, what it came to, what to do next."""
    data = contents.settings.get("data")
    what = f"trained on {Path(data).name}" if isinstance(data, str) and data else "trained"
    sentences = [f"{setting(contents, 'model', 'encoder')}, {what}: {', '.join(facts(contents)) or 'just begun'}."]
    evaluations = [line for line in contents.of_kind("evaluation") if "instance_top1" in line]
    if evaluations:
        first, last = first_like_last(evaluations), evaluations[-1]
        among = f" among {int(last['num_images']):,}" if "num_images" in last else ""
        sentences.append(
            f"For {last['instance_top1']:.0%} of fresh random views it finds the image{among} they were made from; "
            f"before training for {first['instance_top1']:.0%}."
        )
    for share, after, first in _last_score(evaluations, "knn_20"):
        untrained = _at_first(first, "knn_20", "; with an untrained encoder", "; with the first weights")
        sentences.append(f"20 nearest neighbors guess the label of {share:.1%} of images{after}{untrained}.")
    epochs = setting(contents, "training", "epochs")
    sentence = str(verdict(contents.lines, epochs if isinstance(epochs, int) else None))
    return [*sentences, f"Verdict: {sentence}."]


def _last_score(evaluations: list[dict[str, Any]], name: str) -> Iterator[tuple[float, str, dict[str, Any]]]:
    """(newest, after which epoch if that is not the last evaluation, the first line that has one), if there is one."""
    scored = [line for line in evaluations if name in line]
    if scored:
        after = "" if scored[-1] is evaluations[-1] else f" after epoch {scored[-1]['epoch']:.4g}"
        yield scored[-1][name], after, scored[0]


def _at_first(first: dict[str, Any], name: str, untrained: str, start: str) -> str:
    """A number before the first step: of random weights, or of those that training began with."""
    words, value = (
        (start, first[f"start_{name}"]) if f"start_{name}" in first else (untrained, first.get(f"random_{name}"))
    )
    return "" if value is None else f"{words} {value:.1%}"


def cards(contents: Contents) -> list[tuple[str, str]]:
    """(number, what it is)"""
    evaluations = [line for line in contents.of_kind("evaluation") if "instance_top1" in line]
    found = []
    if evaluations:
        first, last = first_like_last(evaluations), evaluations[-1]
        for name in ("knn_200", "knn_20"):
            for share, after, start in _last_score(evaluations, name):
                untrained = _at_first(start, name, "; untrained encoder", "; first weights")
                found.append((f"{share:.1%}", f"{name_of(name)}{after}{untrained}"))
        for name, form in (("instance_top1", ".1%"), ("effective_rank", ".0f")):
            if name in first and name in last:
                found.append((f"{last[name]:{form}}", f"{name_of(name)}; before training {first[name]:{form}}"))
    speeds = sorted(line["images_per_second"] for line in contents.of_kind("step") if "images_per_second" in line)
    if speeds:
        found.append((f"{speeds[len(speeds) // 2]:,.0f}", "images a second while it trained"))
    return found


def flat(settings: dict[str, Any]) -> dict[str, str]:
    """Settings of groups under `group · name`."""
    rows = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            rows |= {f"{name} · {inner}": str(each) for inner, each in value.items()}
        else:
            rows[name] = str(value)
    return rows

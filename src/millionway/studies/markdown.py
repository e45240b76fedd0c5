"""Numbers of a study -> Markdown and a picture."""

import itertools
import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millionway.reporting.intervals import half_interval

Numbers = dict[str, dict[int, dict[str, Any]]]
"""{row: {seed: result}}"""

COLORS = ("#2563eb", "#d97706", "#059669", "#b91c1c", "#7c3aed", "#6b7280", "#0e7490", "#a16207")


def mean_and_spread(values: Sequence[float]) -> str:
    """In percent, with the standard deviation over seeds."""
    mean = 100 * statistics.mean(values)
    return f"{mean:.1f}" if len(values) < 2 else f"{mean:.1f} ± {100 * statistics.stdev(values):.1f}"


def difference(values: dict[int, float], reference: dict[int, float]) -> str:
    """Mean difference over the seeds both have, with its 95 % interval; one that holds 0 is undecided."""
    seeds = sorted(values.keys() & reference.keys())
    differences = [values[seed] - reference[seed] for seed in seeds]
    if not differences:
        return ""
    if len(differences) < 2:
        return "undecided (one seed)"
    mean, half = statistics.mean(differences), half_interval(differences)
    verdict = "" if abs(mean) > half else ", undecided"
    return f"{100 * mean:+.1f} ± {100 * half:.1f}{verdict}"


def accuracy_table(numbers: Numbers, papers: dict[str, float], paper_epochs: str, epochs: Sequence[int]) -> str:
    """k-NN after some epochs and at the end, linear at the end, and what the paper has."""
    heads = ["", *_heads(epochs), *([f"paper (ImageNet, {paper_epochs}, linear)"] if papers else [])]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for row, results in numbers.items():
        if results:
            values = [list(column.values()) for column in _columns(results, epochs)]
            cells = [row, *(mean_and_spread(each) if each else "" for each in values)]
            paper = papers.get(row)
            lines.append(_line([*cells, *(["" if paper is None else f"{paper:.1f}"] if papers else [])]))
    return "\n".join(lines)


def difference_table(numbers: Numbers, pairs: Sequence[tuple[str, str]], epochs: Sequence[int]) -> str:
    """The differences of pairs of rows, seed by seed, in the same columns; '' if no pair is there."""
    heads = ["difference", *_heads(epochs)]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for row, reference in pairs:
        if numbers.get(row) and numbers.get(reference):
            columns = zip(_columns(numbers[row], epochs), _columns(numbers[reference], epochs))
            lines.append(_line([f"{row} - {reference}", *(difference(ours, theirs) for ours, theirs in columns)]))
    return "\n".join(lines) if len(lines) > 2 else ""


def _heads(epochs: Sequence[int]) -> list[str]:
    return [*(f"k-NN after {epoch}" for epoch in epochs), "k-NN", "linear"]


def _columns(results: dict[int, dict[str, Any]], epochs: Sequence[int]) -> list[dict[int, float]]:
    """{seed: value} for each column of numbers."""
    along = [
        {seed: p["knn_200"] for seed, result in results.items() for p in result["curve"] if p["epoch"] == epoch}
        for epoch in epochs
    ]
    return along + [{seed: result[name] for seed, result in results.items()} for name in ("knn_200", "linear_top1")]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def similarity_table(numbers: Numbers) -> str:
    heads = ["rows", "intra", "inter", "gap", "gap at the first step", "nearest row of the same class", "paper"]
    papers = {"fixed-bn": "gap ~1.5", "running-bn": "gap ~9.3; retrieval 3 (chance 0.1)"}
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for row, results in numbers.items():
        if results:
            names = ("intra", "inter", "gap", "gap_training", "retrieval")
            values = [[result[name] for result in results.values() if name in result] for name in names]
            cells = [row, *(mean_and_spread(each) if each else "" for each in values), papers.get(row, "")]
            lines.append(_line(cells))
    return "\n".join(lines)


def correlation_table(numbers: Numbers) -> str:
    """Pearson's correlation of instance top-1 with k-NN over the checkpoints of each run."""
    lines = ["| runs | checkpoints | correlation of instance top-1 and k-NN, per seed |", "|---|---|---|"]
    for row, results in numbers.items():
        if results:
            each = [correlation(result["curve"]) for result in results.values()]
            num = sum(len(result["curve"]) for result in results.values())
            lines.append(f"| {row} | {num} | {', '.join(f'{value:.2f}' for value in each)} |")
    points = [point for results in numbers.values() for result in results.values() for point in result["curve"]]
    if points:
        lines.append(f"| all together | {len(points)} | {correlation(points):.2f} |")
    return "\n".join(lines)


def correlation(points: Sequence[dict[str, float]]) -> float:
    """nan if one of the two does not change."""
    x, y = [point["instance_top1"] for point in points], [point["knn_200"] for point in points]
    if len(set(x)) < 2 or len(set(y)) < 2:
        return math.nan
    return statistics.correlation(x, y)


# --- pictures ---------------------------------------------------------------------------------------------------------


def draw(study: str, question: str, numbers: Numbers, path: Path) -> None:
    """Curves over epochs; for the two others a scatter plot and bars."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.set_title(textwrap.fill(question, 64), fontsize=10, loc="left", fontweight="bold")
    kinds = {"prior-similarity": _bars, "instance-vs-semantic": _scatter}
    kinds.get(study, _curves)(axes, {row: results for row, results in numbers.items() if results})
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    with rc_context({"svg.hashsalt": study}):  # the same numbers make the same file
        figure.savefig(path, metadata={"Date": None})


def _curves(axes: Any, numbers: Numbers) -> None:
    # Where the rows differ in the number of views, the axis is what they have in common.
    in_views = len({_num_views(result) for results in numbers.values() for result in results.values()}) > 1
    for (row, results), color in zip(numbers.items(), itertools.cycle(COLORS)):
        epochs = sorted({point["epoch"] for result in results.values() for point in result["curve"]})
        values = {
            epoch: [p["knn_200"] for r in results.values() for p in r["curve"] if p["epoch"] == epoch]
            for epoch in epochs
        }
        means = [100 * statistics.mean(values[epoch]) for epoch in epochs]
        spreads = [100 * statistics.stdev(v) if len(v) > 1 else 0.0 for v in values.values()]
        x = [epoch * (_num_views(next(iter(results.values()))) if in_views else 1) for epoch in epochs]
        axes.plot(x, means, "o-", color=color, markersize=3, linewidth=1.6, label=row)
        low, high = ([m + sign * s for m, s in zip(means, spreads)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
    axes.set_xlabel("views of each image" if in_views else "epoch", fontsize=9)
    axes.set_ylabel("k-NN accuracy, %", fontsize=9)
    axes.legend(fontsize=8, frameon=False)


def _num_views(result: dict[str, Any]) -> int:
    return result.get("settings", {}).get("views", 2)


def _scatter(axes: Any, numbers: Numbers) -> None:
    for (row, results), color in zip(numbers.items(), COLORS):
        points = [point for result in results.values() for point in result["curve"]]
        x, y = ([100 * point[name] for point in points] for name in ("instance_top1", "knn_200"))
        axes.scatter(x, y, s=14, color=color, alpha=0.8, label=row)
    axes.set_xlabel("instance top-1 on fresh views, %", fontsize=9)
    axes.set_ylabel("k-NN accuracy, %", fontsize=9)
    axes.legend(fontsize=8, frameon=False)


def _bars(axes: Any, numbers: Numbers) -> None:
    for place, name in enumerate(("intra", "inter")):
        values = [[100 * result[name] for result in results.values()] for results in numbers.values()]
        heights = [statistics.mean(each) for each in values]
        errors = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in values]
        x = [index + 0.36 * (place - 0.5) for index in range(len(values))]
        label = {"intra": "with the image's own row", "inter": "with other rows"}[name]
        axes.bar(x, heights, 0.34, yerr=errors, color=COLORS[place], label=label, capsize=2)
    axes.set_xticks(range(len(numbers)), list(numbers))
    axes.set_ylabel("mean cosine of a view, x 100", fontsize=9)
    axes.legend(fontsize=8, frameon=False)

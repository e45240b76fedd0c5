"""Cells of the comparison -> tables in docs/experiments.md and a picture of k-NN against CPU seconds."""

import itertools
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from peer_cells import METHODS, RESULTS, TUNING, Cell
from presets import write_between_marks

from millionway.studies.markdown import COLORS, difference, mean_and_spread

DOCUMENT = Path(__file__).parent.parent / "docs" / "experiments.md"
REFERENCES = ("SimCLR", "MoCo v2", "SimCLR, Muon")
LONG = 50  # epochs: from there on a comparison of its own
SCORES = {"knn_200": "k-NN", "linear_top1": "linear"}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def name_of(cell: dict[str, Any]) -> str:
    """The method whose values a cell has, or what differs from it."""
    for name, method in METHODS.items():
        if (method.method, method.values) == (cell["method"], cell["values"]):
            return name
    base = METHODS[cell["method"]].values
    changes = [f"{key} {value}" for key, value in cell["values"].items() if base.get(key) != value]
    return f"{cell['method']}, {', '.join(changes)}".replace("_", " ")


Results = dict[tuple[str, int], dict[int, dict[str, Any]]]
"""{(method, epochs): {seed: result}}"""


def results_of(folder: Path, long: bool) -> Results:
    """Those of the seeds that were not tuned on."""
    found: Results = defaultdict(dict)
    for path in sorted(folder.glob("*.json")):
        result = read(path)
        if result["cell"]["seed"] != 0 and (result["cell"]["epochs"] >= LONG) == long:
            found[name_of(result["cell"]), result["cell"]["epochs"]][result["cell"]["seed"]] = result
    return found


def comparison(found: Results) -> str:
    """Methods in the order of their k-NN, then each against the references."""
    values = {key: {s: [r[s] for r in runs.values()] for s in SCORES} for key, runs in found.items()}
    order = sorted(found, key=lambda key: -statistics.mean(values[key]["knn_200"]))
    lines = ["| method | epochs | seeds | CPU seconds | k-NN | linear |", "|---|---|---|---|---|---|"]
    for key in order:
        seconds = statistics.mean(run["cpu_seconds"] for run in found[key].values())
        seeds = ", ".join(map(str, sorted(found[key])))
        scores = " | ".join(mean_and_spread(values[key][score]) for score in SCORES)
        lines.append(f"| {key[0]} | {key[1]} | {seeds} | {seconds:.0f} | {scores} |")
    lines += ["", "| difference, paired by seed | k-NN | linear |", "|---|---|---|"]
    for ours in (key for key in order if key[0].startswith("ours")):
        for theirs in (key for key in order if key[0] in REFERENCES):
            columns = [
                difference(*({seed: run[score] for seed, run in found[key].items()} for key in (ours, theirs)))
                for score in SCORES
            ]
            if any(columns):
                lines.append(f"| {ours[0]} ({ours[1]} epochs) - {theirs[0]} ({theirs[1]}) | {' | '.join(columns)} |")
    commits = sorted({run["environment"]["commit"] for runs in found.values() for run in runs.values()})
    return "\n".join([*lines, "", f"Commits {', '.join(commits)}."])


def tried(cells: list[Cell]) -> str:
    lines = ["| images | method | values, epochs | CPU seconds | k-NN | linear |", "|---|---|---|---|---|---|"]
    finished = [(cell, read(cell.result)) for cell in cells if cell.result.exists()]
    order = lambda item: (item[0].set, item[0].images, item[0].method, -item[1]["knn_200"])
    for cell, result in sorted(finished, key=order):
        values = ", ".join(f"{name} {value}" for name, value in cell.values.items()).replace("_", " ")
        scores = " | ".join(f"{100 * result[score]:.1f}" for score in SCORES)
        about = f"{cell.images:,}, {cell.set.replace('-', ' ')} | {cell.method}"
        head = f"| {about} | {values or 'those of lightly'}; {cell.epochs}"
        lines.append(f"{head} | {result['cpu_seconds']:.0f} | {scores} |")
    return "\n".join(lines)


def draw(found: Results, path: Path) -> None:
    """k-NN on few images against CPU seconds, mean over seeds."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 3.8), layout="constrained")
    axes = figure.subplots()
    drawn = [(key, runs) for key, runs in found.items() if key[0] in METHODS and _curves(runs)]
    drawn.sort(key=lambda each: -statistics.mean(run["knn_200"] for run in each[1].values()))
    for (name, epochs), runs in drawn:
        curves = _curves(runs)
        seconds = [statistics.mean(point["cpu_seconds"] for point in points) for points in zip(*curves)]
        scores = [100 * statistics.mean(point["knn_200"] for point in points) for points in zip(*curves)]
        color = COLORS[list(METHODS).index(name) % len(COLORS)]
        axes.plot(seconds, scores, "o-", markersize=3, linewidth=1.6, color=color, label=f"{name}, {epochs} epochs")
    axes.set_xlabel("CPU seconds of training", fontsize=9)
    axes.set_ylabel("k-NN accuracy, %", fontsize=9)
    figure.legend(fontsize=8, frameon=False, loc="outside right center")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    with rc_context({"svg.hashsalt": path.stem.removeprefix("peers_")}):
        figure.savefig(path, metadata={"Date": None})


def _curves(runs: dict[int, dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Of the runs that were scored along the way."""
    curves = [[point for point in run["curve"] if "knn_200" in point] for run in runs.values()]
    return [points for points in curves if points]


def costs() -> str:
    """What an epoch takes, and how many epochs of a method take as long as ten of SimCLR."""
    lines = ["| images | method | CPU seconds of an epoch | epochs in the time of SimCLR's ten |", "|---|---|---|---|"]
    commits = []
    for path in sorted(RESULTS.glob("cost_*.json")):
        found, images = read(path), path.stem.removeprefix("cost_").replace("_", " ")
        seconds = found["seconds_of_an_epoch"]
        for name, value in seconds.items():
            lines.append(f"| {images} | {name} | {value:.1f} | {10 * seconds['SimCLR'] / value:.1f} |")
        commits.append(found["environment"]["commit"])
    return "\n".join([*lines, "", f"Commits {', '.join(commits)}."])


def view_costs() -> str:
    """What a view takes by rows alone, and how much more that is than SimCLR's with as many views in a step.

    Then what the matrix products of rows alone add to SimCLR's, which computes a loss of its own besides.
    """
    heads = ["images", "encoder in", "views a step", "SimCLR, ms a view", "rows of 128 dimensions", "of 64"]
    heads += ["their products alone, 128", "64"]
    lines, commits = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"], []
    for path in sorted(RESULTS.glob("view_cost_*.json"), key=lambda path: int(path.stem.split("_")[-1])):
        for each in (found := read(path))["steps"]:
            seconds = each["seconds_of_a_view"]
            parts = [seconds[f"{dim} dimensions"] / seconds["SimCLR"] - 1 for dim in (128, 64)]
            parts += [seconds[f"products, {dim}"] / seconds["SimCLR"] for dim in (128, 64)]
            head = f"| {found['images']:,} | {each['precision']} | {each['views_in_a_step']}"
            lines.append(f"{head} | {1000 * seconds['SimCLR']:.3f} | {' | '.join(f'{part:+.1%}' for part in parts)} |")
        commits.append(found["environment"]["commit"])
    return "\n".join([*lines, "", f"Commits {', '.join(commits)}."])


def step_parts() -> str:
    """Of ours, and the share of each."""
    names = {"data": "views", "encoder": "encoder and losses around it", "optimizer": "Muon", "classifier": "rows"}
    lines = [f"| images | batch | {' | '.join(names.values())} |", "|---" * (2 + len(names)) + "|"]
    found = read(RESULTS / "step_parts.json")
    for each in found["steps"]:
        total = sum(each["milliseconds"].values())
        shares = " | ".join(
            f"{each['milliseconds'][part]:.1f} ms, {each['milliseconds'][part] / total:.0%}" for part in names
        )
        lines.append(f"| {each['images']:,}, {each['dim']} dimensions | {each['batch_size']} | {shares} |")
    return "\n".join([*lines, "", f"Commit {found['environment']['commit']}."])


def speeds() -> str:
    lines = ["| images | side | images per CPU second | times lightly's SimCLR |", "|---|---|---|---|"]
    for path in sorted(RESULTS.parent.glob("step_speed_*.json")):
        found = read(path)
        theirs = found["images_per_cpu_second"]["lightly SimCLR, 2 views"]
        for side, speed in found["images_per_cpu_second"].items():
            lines.append(f"| {found['image_size']} px | {side} | {speed:.0f} | {speed / theirs:.2f} |")
    return "\n".join(lines)


def write() -> None:
    """All that the finished cells can say."""
    write_between_marks(DOCUMENT, "peers cost", costs())
    write_between_marks(DOCUMENT, "peers view cost", view_costs())
    write_between_marks(DOCUMENT, "step parts", step_parts())
    write_between_marks(DOCUMENT, "step speed", speeds())
    write_between_marks(DOCUMENT, "peers tuning", tried(TUNING))
    folders = sorted(path for path in RESULTS.iterdir() if path.is_dir())
    for folder, ending in itertools.product(folders, ("", "_long")):
        if found := results_of(folder, bool(ending)):
            write_between_marks(DOCUMENT, f"peers {folder.name}{ending}", comparison(found))
            draw(found, DOCUMENT.parent / f"peers_{folder.name}{ending}.svg")

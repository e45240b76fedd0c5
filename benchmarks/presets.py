"""How good and how fast is a preset? Several seeds, each a whole run; writes the tables that the documents show.

    python benchmarks/presets.py digits
    python benchmarks/presets.py cifar10-small --data cifar10/train --test-data cifar10/test --seeds 1 2

The presets' values were chosen with seed 0, so that is not among the seeds.
"""

import argparse
import json
import re
import statistics
import tempfile
import time
from pathlib import Path

import millionway
from millionway.reporting.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "src" / "millionway" / "settings" / "measured.json"
SMALLEST = "digits"  # is the README's
NUMBERS = ("knn_200", "knn_20", "linear_top1")


def measure(preset: str, seed: int, data: str | None, test_data: str | None) -> dict:
    """One run: accuracies of the random and the pretrained encoder, the time of training, and where it ran."""
    with tempfile.TemporaryDirectory(prefix="millionway-") as folder:
        started = time.monotonic()
        run = millionway.pretrain(data=data, out=Path(folder) / "run", preset=preset, seed=seed)
        seconds = time.monotonic() - started
        environment = json.loads((run / "environment.json").read_text())
        numbers = {}
        for protocol in ("knn", "linear"):
            found = millionway.evaluate(protocol, run, test_data=test_data, seed=seed)
            untrained = {f"random_{name}": value for name, value in found.pop("untrained").items()}
            numbers |= found | untrained
        if preset == SMALLEST:  # the run's own evaluations have the same queries
            first = next(line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "evaluation")
            numbers |= {f"after_prior_{name}": first[name] for name in ("knn_200", "knn_20")}
    return {"seed": seed, "seconds": seconds, **numbers, "environment": environment}


def summarize(runs: list[dict]) -> dict:
    environment = runs[-1]["environment"]
    summary = {"num_seeds": len(runs), "commit": environment["commit"]}
    cores = "1 core" if environment["threads"] == 1 else f"{environment['threads']} cores"
    summary["hardware"] = environment["gpu"] or f"{cores} of an {environment['cpu']} processor"
    for name in runs[0].keys() - {"seed", "environment"}:
        values = [run[name] for run in runs]
        summary |= {f"{name}_mean": statistics.mean(values), f"{name}_spread": statistics.stdev(values)}
    return summary


def table(summary: dict, runs: list[dict]) -> str:
    rows = {
        "chance": ("chance", "chance", "chance"),
        "random encoder": tuple(f"random_{name}" for name in NUMBERS),
        "random encoder, BN statistics of the prior's pass": ("after_prior_knn_200", "after_prior_knn_20", None),
        "pretrained encoder": NUMBERS,
    }
    lines = ["| encoder | k-NN, k = 200 | k-NN, k = 20 | linear |", "|---|---|---|---|"]
    for title, names in rows.items():
        if f"{names[0]}_mean" not in summary:
            continue
        cells = [f"{summary[f'{n}_mean']:.1%} ± {summary[f'{n}_spread']:.1%}" if n else "" for n in names]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    seeds = ", ".join(str(run["seed"]) for run in runs)
    lines += [
        "",
        f"Mean ± standard deviation over seeds {seeds}; {summary['seconds_mean']:.0f} s a run on "
        f"{summary['hardware']}, commit {summary['commit']}.",
    ]
    return "\n".join(lines)


def write_between_marks(path: Path, name: str, text: str) -> None:
    """Replace what stands between <!-- name --> and <!-- /name -->."""
    page = path.read_text(encoding="utf-8")
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
    assert marks.search(page), f"{path} has no marks for {name}"
    path.write_text(marks.sub(lambda m: m[1] + text + "\n" + m[2], page), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="two at least")
    parser.add_argument("--data", help="the preset's images, if they are elsewhere")
    parser.add_argument("--test-data")
    chosen = parser.parse_args()
    runs = [measure(chosen.preset, seed, chosen.data, chosen.test_data) for seed in chosen.seeds]
    summary = summarize(runs)
    results = ROOT / "benchmarks" / "results" / f"preset_{chosen.preset}.json"
    content = {"preset": chosen.preset, "summary": summary, "runs": runs}
    results.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    measured = json.loads(MEASURED.read_text()) | {chosen.preset: summary}
    MEASURED.write_text(json.dumps(measured, indent=2, sort_keys=True) + "\n")
    pages = [ROOT / "docs" / "experiments.md"] + ([ROOT / "README.md"] if chosen.preset == SMALLEST else [])
    for page in pages:
        write_between_marks(page, f"preset {chosen.preset}", table(summary, runs))
    print(table(summary, runs))


if __name__ == "__main__":
    main()

"""How good and how fast is a preset? Several seeds, each a whole run; writes the tables that the documents show.

    python benchmarks/presets.py digits --seeds 3

Seeds start at 1: the preset's values were chosen with seed 0.
"""

import argparse
import json
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import millionway
from millionway.reporting.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "src" / "millionway" / "settings" / "measured.json"
NUMBERS = ("knn_200", "knn_20", "linear_top1")


def measure(preset: str, seed: int, folder: Path) -> dict:
    """One run: accuracies of the random and the pretrained encoder, and the time of training."""
    started = time.monotonic()
    run = millionway.pretrain(out=folder / f"seed{seed}", preset=preset, seed=seed)
    seconds = time.monotonic() - started
    first = next(line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "evaluation")
    numbers = {name: value for name, value in first.items() if name.startswith("random_")}
    numbers |= {f"after_prior_{name}": first[name] for name in ("knn_200", "knn_20")}
    numbers |= millionway.evaluate("knn", run, seed=seed, untrained="no")
    numbers |= millionway.evaluate("linear", run, seed=seed, untrained="no")
    return {"seed": seed, "seconds": seconds, **numbers}


def table(summary: dict, runs: list[dict]) -> str:
    rows = {
        "chance": ("chance", "chance", None),
        "random encoder": ("random_knn_200", "random_knn_20", None),
        "random encoder, BN statistics of the prior's pass": ("after_prior_knn_200", "after_prior_knn_20", None),
        "pretrained encoder": ("knn_200", "knn_20", "linear_top1"),
    }
    lines = ["| encoder | k-NN, k = 200 | k-NN, k = 20 | linear |", "|---|---|---|---|"]
    for title, names in rows.items():
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
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="millionway-"))
    runs = [measure(chosen.preset, seed, folder) for seed in range(1, chosen.seeds + 1)]
    environment = json.loads((folder / "seed1" / "environment.json").read_text())
    shutil.rmtree(folder)
    summary = {"num_seeds": len(runs), "commit": environment["commit"]}
    summary["hardware"] = environment["gpu"] or f"{environment['cores']} cores of an {environment['cpu']} processor"
    for name in runs[0].keys() - {"seed"}:
        values = [run[name] for run in runs]
        summary |= {f"{name}_mean": statistics.mean(values), f"{name}_spread": statistics.stdev(values)}

    results = ROOT / "benchmarks" / "results" / f"preset_{chosen.preset}.json"
    content = {"preset": chosen.preset, "summary": summary, "runs": runs, "environment": environment}
    results.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    measured = json.loads(MEASURED.read_text()) | {chosen.preset: summary}
    MEASURED.write_text(json.dumps(measured, indent=2, sort_keys=True) + "\n")
    for page in (ROOT / "README.md", ROOT / "docs" / "experiments.md"):
        write_between_marks(page, f"preset {chosen.preset}", table(summary, runs))
    print(table(summary, runs))


if __name__ == "__main__":
    main()

"""report.html: one self-contained page about a run. Reads the files of the run folder, never the model."""

import json
from html import escape
from pathlib import Path
from typing import Any

from millionway.files import write_whole
from millionway.reporting.charts import line_chart
from millionway.reporting.intervals import INTERVAL, shown
from millionway.reporting.metrics import read_metrics
from millionway.reporting.verdict import verdict

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #f3f4f6; margin: 0; }
main { max-width: 1010px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 34px 0 10px; }
p.lead { color: #4b5563; margin: 4px 0 20px; }
p.verdict { background: #fff; border-left: 4px solid #2563eb; padding: 10px 16px; border-radius: 0 8px 8px 0; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; }
.card { background: #fff; border-radius: 8px; padding: 12px 18px; box-shadow: 0 1px 2px #0002; }
.card b { display: block; font-size: 22px; } .card span { color: #6b7280; font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 12px; }
.charts img { width: 100%; background: #fff; border-radius: 8px; box-shadow: 0 1px 2px #0002; }
table { border-collapse: collapse; background: #fff; border-radius: 8px; box-shadow: 0 1px 2px #0002; }
td, th { padding: 5px 14px; text-align: left; border-top: 1px solid #e5e7eb; font-size: 14px; }
tr:first-child > * { border-top: 0; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
.near { background: #fff; border-radius: 8px; padding: 12px; box-shadow: 0 1px 2px #0002; overflow-x: auto; }
.row { display: flex; gap: 6px; margin: 4px 0; }
.row figure { margin: 0; width: 92px; flex: none; text-align: center; font-size: 11px; color: #6b7280; }
.row figure img { width: 72px; height: 72px; object-fit: contain; border: 3px solid #d1d5db; border-radius: 5px; }
.row figure.query { margin-right: 18px; } .row figure.query img { border-color: #111827; }
.row figure.same img { border-color: #059669; } .row figure.other img { border-color: #dc2626; }
figcaption { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
details { margin-top: 10px; } summary { cursor: pointer; color: #2563eb; }
"""


def write_report(run: Path) -> Path:
    """Draw the page anew; returns its path."""
    if not (run / "config.json").is_file():
        raise ValueError(f"{run}: not a run folder (no config.json)")
    lines = read_metrics(run / "metrics.jsonl")
    steps = [line for line in lines if line["kind"] == "step"]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    settings = json.loads((run / "config.json").read_text(encoding="utf-8"))
    environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    results = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted((run / "evaluation").glob("*.json"))}
    neighbors = results.pop("neighbors", None)
    sections = [
        f"<h1>{escape(str(run.resolve().name))}</h1>",
        f"<p class=lead>{escape(str(settings['model']['encoder']))} pretrained on {escape(settings['data'])}, "
        f"{settings['images']['image_size']} px, {settings['training']['epochs']} epochs</p>",
        f"<p class=verdict>{escape(str(verdict(lines)))}</p>",
        _cards(steps, evaluations),
        _charts(steps, evaluations),
        _results(results),
        _neighbors(neighbors["numbers"]["rows"] if neighbors else []),
        _table("Settings", {f"{group} · {k}" if group else k: v for group, k, v in _flat(settings)}),
        _table("Environment", {f"{group} · {k}" if group else k: v for group, k, v in _flat(environment)}),
    ]
    page = (
        "<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{escape(run.resolve().name)} · millionway</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )
    write_whole(run / "report.html", page)
    return run / "report.html"


def _cards(steps: list[dict], evaluations: list[dict]) -> str:
    cards = []
    if evaluations and "knn_200" in evaluations[-1]:
        first, last = evaluations[0], evaluations[-1]
        for k in (200, 20):
            random = first.get(f"random_knn_{k}", first.get(f"knn_{k}"))
            before = "" if random is None else f"; random encoder {random:.1%}"
            cards.append((f"{last[f'knn_{k}']:.1%}", f"k-NN (k = {k}){before}"))
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        cards.append(
            (
                f"{last['instance_top1']:.1%}",
                f"fresh views find their image; before {first['instance_top1']:.1%}",
            )
        )
        cards.append(
            (
                f"{last['effective_rank']:.0f}",
                f"effective rank of features; before {first['effective_rank']:.0f}",
            )
        )
    if steps:
        speeds = sorted(line["images_per_second"] for line in steps)
        cards.append((f"{speeds[len(speeds) // 2]:,.0f}", "images per second"))
    inner = "".join(f"<div class=card><b>{value}</b><span>{escape(text)}</span></div>" for value, text in cards)
    return f"<div class=cards>{inner}</div>"


def _charts(steps: list[dict], evaluations: list[dict]) -> str:
    def series(lines: list[dict], name: str, title: str) -> tuple[str, list[float], list[float]]:
        there = [line for line in lines if name in line]
        return title, [line["epoch"] for line in there], [line[name] for line in there]

    pictures = []
    if steps:
        pictures.append(line_chart("Loss", [series(steps, "loss", "loss")], "epoch"))
    if evaluations:
        if "knn_200" in evaluations[-1]:
            lines = [series(evaluations, f"knn_{k}", f"k = {k}") for k in (200, 20)]
            pictures.append(line_chart("k-NN accuracy (epoch 0: after the prior's pass)", lines, "epoch", percent=True))
        lines = [series(evaluations, f"instance_top{k}", f"top-{k}") for k in (1, 5)]
        pictures.append(line_chart("Fresh views that find their own image", lines, "epoch", percent=True))
        names = {"positive_cosine": "own row", "hardest_negative_cosine": "nearest other row"}
        pictures.append(
            line_chart("Cosine of a view with rows", [series(evaluations, n, t) for n, t in names.items()], "epoch")
        )
        pictures.append(line_chart("Effective rank of features", [series(evaluations, "effective_rank", "")], "epoch"))
    if steps:
        pictures.append(line_chart("Learning rate", [series(steps, "lr", "lr")], "epoch"))
    images = "".join(f"<img alt='' src='{picture}'>" for picture in pictures)
    return f"<h2>While it trained</h2><div class=charts>{images}</div>" if pictures else ""


def _results(results: dict[str, dict]) -> str:
    if not results:
        return ""
    rows = []
    for protocol, result in results.items():
        about = result["settings"]
        what = Path(about["data"]).name
        if "num_queries" in about:
            what += f": {about['num_queries']:,} queries, {about['num_bank']:,} labeled images"
        chance = f"{about['chance']:.1%}" if "chance" in about else ""
        halves = result.get(INTERVAL, {})
        for name, value in result["numbers"].items():
            number = shown(name, value, halves.get(name))
            rows.append(
                f"<tr><td>{escape(protocol)}<td>{escape(name)}<td class=number>{number}<td>{escape(what)}"
                f"<td class=number>{chance}</tr>"
            )
    head = "<tr><th>protocol<th>number<th>value<th>scored on<th>chance</tr>"
    return f"<h2>Evaluation</h2><table>{head}{''.join(rows)}</table>"


def _neighbors(rows: list[list[dict[str, Any]]]) -> str:
    if not rows:
        return ""
    body = []
    for row in rows:
        figures = []
        for place, entry in enumerate(row):
            same = entry["label"] is not None and entry["label"] == row[0]["label"]
            kind = "query" if place == 0 else "" if entry["label"] is None else "same" if same else "other"
            caption = entry["label"] or Path(entry["key"]).name
            if place:
                caption = f"{entry['cosine']:.2f} · {caption}"
            figures.append(
                f"<figure class='{kind}' title='{escape(entry['key'], quote=True)}'>"
                f"<img alt='' src='data:image/png;base64,{entry['png']}'>"
                f"<figcaption>{escape(caption)}</figcaption></figure>"
            )
        body.append(f"<div class=row>{''.join(figures)}</div>")
    labeled = rows[0][0]["label"] is not None
    colors = " Green: the same label as the query; red: another one." if labeled else ""
    return (
        "<h2>Nearest neighbors by features</h2><p class=lead>Left, an image drawn at random; then the images whose "
        f"features are most similar, with the cosine.{colors}</p><div class=near>{''.join(body)}</div>"
    )


def _flat(settings: dict[str, Any]) -> list[tuple[str, str, Any]]:
    rows = []
    for name, value in settings.items():
        rows += [(name, k, v) for k, v in value.items()] if isinstance(value, dict) else [("", name, value)]
    return rows


def _table(title: str, values: dict[str, Any]) -> str:
    rows = "".join(f"<tr><td>{escape(name)}<td>{escape(str(value))}</tr>" for name, value in values.items())
    return f"<h2>{title}</h2><details><summary>{len(values)} values</summary><table>{rows}</table></details>"

"""report.html: one self-contained page about a run. Reads the files of the run folder, never the model."""

import base64
import hashlib
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from millionway.files import write_whole
from millionway.reporting import words
from millionway.reporting.charts import line_chart
from millionway.reporting.contents import OTHERS, Contents, read_contents

# Nothing runs and nothing is fetched, whatever a file of the run folder says: pictures are in the page, and the only
# style is the one with this hash.
POLICY = "default-src 'none'; img-src data:; style-src 'sha256-{style}'; base-uri 'none'; form-action 'none'"


def write_report(run: Path) -> Path:
    """Draw the page anew; returns its path."""
    write_whole(run / "report.html", draw(read_contents(run)))
    return run / "report.html"


def redraw(run: Path) -> None:
    """After something that matters whatever becomes of the page: an evaluation, or a run that stopped."""
    with suppress(OSError, ValueError):
        write_report(run)


def draw(contents: Contents) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(
        loader=PackageLoader("millionway.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = pages.get_template("report.css").render()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return pages.get_template("report.html").render(
        style=style,
        policy=POLICY.format(style=digest),
        name=contents.name,
        summary=words.summary(contents),
        cards=words.cards(contents),
        charts=_charts(contents),
        scores=[words.scored(score) for score in contents.scores],
        others={who: name for who, name in OTHERS.items() if any(who in score.beside for score in contents.scores)},
        samples=contents.samples,
        neighbors=contents.neighbors,
        tables={"Settings": words.flat(contents.settings), "Environment": words.flat(contents.environment)},
    )


def _charts(contents: Contents) -> list[tuple[str, str]]:
    """(what it shows, address of the picture)"""
    steps, evaluations = contents.of_kind("step"), contents.of_kind("evaluation")

    def chart(title: str, lines: list[dict[str, Any]], names: dict[str, str], **how: Any) -> list[tuple[str, str]]:
        there = [(label, [line for line in lines if name in line], name) for name, label in names.items()]
        drawn = [(label, [ln["epoch"] for ln in lns], [ln[name] for ln in lns]) for label, lns, name in there if lns]
        return [(title, line_chart(title, drawn, "epoch", **how))] if drawn else []

    counts = {line["num_images"] for line in steps if line.get("num_images", 0) > 1}
    level = ("guessing: ln N", math.log(counts.pop())) if len(counts) == 1 else None
    return [
        *chart(
            "Fresh views that find their own image",
            evaluations,
            {f"instance_top{k}": f"top-{k}" for k in (1, 5)},
            percent=True,
        ),
        *chart("k-NN accuracy", evaluations, {f"knn_{k}": f"k = {k}" for k in (200, 20)}, percent=True),
        *chart("Loss", steps, {"loss": "loss"}, level=level),
        *chart(
            "Cosine of a view with rows",
            evaluations,
            {"positive_cosine": "own row", "hardest_negative_cosine": "nearest other row"},
        ),
        *chart("Effective rank of features", evaluations, {"effective_rank": "effective rank"}),
        *chart("Learning rate", steps, {"lr": "learning rate"}),
    ]

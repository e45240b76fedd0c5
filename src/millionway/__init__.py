"""Pretrain a vision encoder on your own unlabeled images by telling every one of them apart.

The verbs of the command line as functions; their parameters are declared in `settings`. What is heavy is imported when
it is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from millionway.settings.bench import Bench
from millionway.settings.collection import Collected, Duplicates, Explore, Map, Outliers, Search
from millionway.settings.demo import Demo
from millionway.settings.embed import Embed
from millionway.settings.evaluate import Evaluate
from millionway.settings.export import Export
from millionway.settings.index import Index
from millionway.settings.parameters import taking, with_all_settings
from millionway.settings.plan import Plan
from millionway.settings.report import Report
from millionway.settings.study import Study

if TYPE_CHECKING:
    import pyarrow as pa

    from millionway.collection.collection import Collection
    from millionway.data.indexing import Changes
    from millionway.model.encoder import Encoder
    from millionway.train.outlook import Outlook
    from millionway.train.plan import Answer
    from millionway.train.run_object import Run

__version__ = "0.1.0"
__all__ = [
    "bench",
    "demo",
    "duplicates",
    "embed",
    "evaluate",
    "explore",
    "export",
    "index",
    "load_encoder",
    "map",
    "open_collection",
    "outliers",
    "plan",
    "pretrain",
    "report",
    "search",
    "study",
]


@with_all_settings
def pretrain(
    data: str | Path | None = None,
    out: str | Path | None = None,
    preset: str | None = None,
    *,
    resume: bool = False,
    **settings: Any,
) -> Run:
    """Pretrain an encoder and write its report; returns the run: a path, with encoder(), metrics, evaluate(), ...

    `settings` are those of the command line, with underscores:
    `millionway.pretrain("photos", "runs/photos", epochs=50, image_size=96)`.
    """
    from millionway.settings.pretrain import with_settings
    from millionway.settings.stored import first_settings
    from millionway.train.run import pretrain as run
    from millionway.train.run_object import Run

    if resume and out is None:
        raise ValueError("resume needs out, the run folder to go on with")
    given = {"data": data, "out": out}
    settings |= {name: value for name, value in given.items() if value is not None}
    return Run(run(with_settings(first_settings(preset, Path(out) if resume and out else None), **settings)))


@taking(Evaluate)
def evaluate(asked: Evaluate) -> dict[str, Any]:
    """Score an encoder by a protocol, or by all that the data allows. Returns its numbers.

    With several seeds the numbers are means. The file PROTOCOL.json goes to RUN/evaluation, or to `out`.
    """
    from millionway.evaluation.protocols import evaluate as run
    from millionway.reporting.page import redraw

    results = run(asked)
    if asked.run is not None and asked.out is None and (asked.run / "config.json").is_file():
        redraw(asked.run)
    return results if asked.protocol == "all" else results[asked.protocol]


@taking(Plan)
def plan(asked: Plan) -> dict[str, Answer] | Outlook:
    """Of `data`: memory, a batch that fits, time and disk of a run here.

    Of a number of images: memory, communication and largest number, with rows split (hybrid) or replicated.
    """
    if asked.data is not None:
        from millionway.train.outlook import outlook

        return outlook(asked)
    from millionway.train.plan import plan as run

    return run(asked)


@taking(Embed)
def embed(asked: Embed) -> Path:
    """Features of all images as .parquet or .npy."""
    from millionway.evaluation.embed import embed as run

    return run(asked)


@taking(Export)
def export(asked: Export) -> Path:
    """The encoder for other software: safetensors, torch, onnx, pt2, timm, huggingface, detectron2."""
    from millionway.exporting.export import export as run

    return run(asked)


@taking(Index)
def index(asked: Index) -> Changes:
    """Number the images, check that each can be read, and write the list; or bring it up to date, if it is there."""
    from millionway.console import track
    from millionway.data.images import set_limits
    from millionway.data.indexing import index as run
    from millionway.data.kinds.choose import open_source
    from millionway.machine import num_cores

    set_limits(asked.max_pixels, asked.max_image_bytes)
    source = open_source(asked.data, asked.data_root)
    return run(source, asked.out, asked.threads or num_cores(), track, asked.duplicates)


@taking(Bench)
def bench(asked: Bench) -> dict[str, float]:
    """Images per second of loading `data`: reading, two views each, and views with --cache."""
    from millionway.data.speed import measure

    return measure(asked)


@taking(Report)
def report(asked: Report) -> Path:
    """Draw the run's page, RUN/report.html, from its files."""
    from millionway.reporting.page import write_report

    return write_report(asked.run)


@taking(Demo)
def demo(asked: Demo) -> dict[str, Any]:
    """Pretrain on 1,797 handwritten digits and score the encoder; a number is added to `out` if it exists.

    Returns `run`, `report`, and k-NN accuracies as {encoder: {k: accuracy}}.
    """
    from millionway.reporting.metrics import read_metrics

    folder, number = asked.out, 1
    while folder.exists():
        number += 1
        folder = asked.out.with_name(f"{asked.out.name}-{number}")
    changes: dict[str, Any] = {} if asked.epochs is None else {"epochs": asked.epochs}
    pretrain(out=folder, preset="digits", seed=asked.seed, **changes)
    trained = evaluate("knn", folder, seed=asked.seed)
    evaluate("linear", folder, seed=asked.seed)
    first = next(line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "evaluation")
    accuracies = {
        "none (chance)": {200: trained["chance"], 20: trained["chance"]},
        "random": {k: first[f"random_knn_{k}"] for k in (200, 20)},
        "pretrained": {k: trained[f"knn_{k}"] for k in (200, 20)},
    }
    return {"run": folder, "report": report(folder), "accuracies": accuracies}


@taking(Study)
def study(asked: Study) -> Path:
    """Run one of the paper's ablations on a data set and write NAME.json, NAME.md and NAME.svg into `out`."""
    from millionway.studies.study import study as run

    return run(asked)


@taking(Collected)
def open_collection(asked: Collected) -> Collection:
    """Images with a vector each, as one object with .search(...), .duplicates(), .outliers(), .map()."""
    from millionway.collection.opening import open_collection as run
    from millionway.console import track

    return run(asked, track)


@taking(Search)
def search(asked: Search) -> pa.Table:
    """The images that are most like each query: query, id, path, label, cosine."""
    from millionway.collection.verbs import search as run

    return run(asked)


@taking(Duplicates)
def duplicates(asked: Duplicates) -> pa.Table:
    """Groups of the same or nearly the same picture, or what is in `against` too; nothing is deleted."""
    from millionway.collection.verbs import duplicates as run

    return run(asked)


@taking(Outliers)
def outliers(asked: Outliers) -> pa.Table:
    """The images that belong least: id, path, label, score, reason."""
    from millionway.collection.verbs import outliers as run

    return run(asked)


@taking(Map)
def map(asked: Map) -> Path:
    """Place, cluster, neighbors, scores and thumbnail of every image as one Parquet file."""
    from millionway.collection.verbs import map as run

    return run(asked)


@taking(Explore)
def explore(asked: Explore) -> Path | None:
    """Serve a page to walk through the images, until Ctrl-C; or write it into the folder `export`."""
    from millionway.explorer.explore import explore as run

    return run(asked)


def load_encoder(path: str | Path) -> Encoder:
    """The trained encoder as a torch module: colors from 0 to 1 in, features out. `path`: run folder or file."""
    from millionway.model.encoder_file import load_encoder as load

    return load(path)

"""The verbs: parse, call one function, print."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import millionway
from millionway.parallel.launcher import is_first_process, times_restarted
from millionway.settings.bench import Bench
from millionway.settings.checks import suggest
from millionway.settings.collection import Duplicates, Explore, Map, Outliers, Search
from millionway.settings.command_line import MainSettings, parse, pretrain_settings, value_of
from millionway.settings.demo import Demo
from millionway.settings.embed import Embed
from millionway.settings.evaluate import Evaluate
from millionway.settings.export import Export
from millionway.settings.index import Index
from millionway.settings.plan import Plan
from millionway.settings.presets import PRESETS, measured
from millionway.settings.report import Report
from millionway.settings.study import Study

out = Console()
NEXT = (
    "evaluate all --run {} --data LABELED",
    "explore --run {}",
    "export --run {} --out FILE --format onnx",
)
"""what can be done with a run that is finished"""


def main(args: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a run stopped, 2 bad input, 130 interrupted."""
    args = list(sys.argv[1:] if args is None else args)
    if not args or args[0] in ("-h", "--help", "help"):
        _print_verbs()
        return 0
    if args[0] in ("--version", "version"):
        print(f"millionway {millionway.__version__}")
        return 0
    verb, rest = args[0], args[1:]
    if verb not in VERBS:
        return _fail(f"{verb}: no such command. {suggest(verb, VERBS)}", 2)
    try:
        VERBS[verb](rest)
        return 0
    except SystemExit as exit:  # tyro has printed why
        return int(exit.code or 0)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except ValueError as error:
        return _fail(str(error), 2)
    except (RuntimeError, OSError) as error:
        from millionway.data.readers import ReaderKilled
        from millionway.parallel.collectives import OtherRankFailed
        from millionway.train.stops import Interrupted, RunStopped

        if isinstance(error, OSError):
            return _fail(f"{error.filename or 'error'}: {error.strerror or error}", 1)
        if not isinstance(error, RunStopped | ReaderKilled | OtherRankFailed):
            raise
        return _fail(str(error), 130 if isinstance(error, Interrupted) else 1)


def _fail(message: str, code: int) -> int:
    from millionway.console import printable

    if os.environ.get("MILLIONWAY_TRACEBACK") and sys.exc_info()[0]:
        Console(stderr=True).print_exception()
    print(f"millionway: {printable(message)}", file=sys.stderr)
    return code


def _print_verbs() -> None:
    out.print("[bold]millionway[/bold]: pretrain a vision encoder on your own unlabeled images.\n")
    table = Table.grid(padding=(0, 3))
    for name, verb in VERBS.items():
        table.add_row(f"  millionway {name}", (verb.__doc__ or "").strip().splitlines()[0])
    out.print(table)
    out.print("\nmillionway VERB --help says more. Start with: millionway pretrain --data PHOTOS --out runs/photos")


def pretrain(args: list[str]) -> None:
    """train an encoder on a folder of images, without labels"""
    if "-h" in args or "--help" in args:
        parse(MainSettings, args, "pretrain")
    config = pretrain_settings(_after_restart(["--help" if arg == "--help-all" else arg for arg in args]))
    from millionway.train.run import pretrain as run

    folder = run(config)
    if is_first_process():
        print(f"run     {folder}\nreport  {folder / 'report.html'}\n\nNext:")
        for command in NEXT:
            print(f"  millionway {command.format(shlex.quote(str(folder)))}")


def _after_restart(args: list[str]) -> list[str]:
    """torchrun gives the same command again after a failure: then the run goes on, if it had begun.

    The settings stay, so that another run's folder is refused.
    """
    out = value_of("--out", args)
    if times_restarted() and out and "--resume" not in args and (Path(out) / "config.json").exists():
        return [*args, "--resume"]
    return args


def evaluate(args: list[str]) -> None:
    """score an encoder: knn, linear, few-labels, finetune, retrieval, detect, health"""
    from millionway.evaluation.results import columns, rows

    chosen = parse(Evaluate, args, "evaluate")
    with _messages():
        numbers = millionway.evaluate(**vars(chosen))
    results = numbers if chosen.protocol == "all" else {chosen.protocol: numbers}
    table = Table("protocol", "", "value", *columns(results).values())
    for row in rows(results):
        table.add_row(*row)
    out.print(table)
    folder = chosen.out or (chosen.run / "evaluation" if chosen.run and chosen.run.is_dir() else None)
    if folder is not None:
        print(f"written  {folder / ('' if chosen.protocol == 'all' else chosen.protocol + '.json')}")


def plan(args: list[str]) -> None:
    """say what a run would take: memory, a batch that fits, hours, disk"""
    chosen = parse(Plan, args, "plan")
    with _messages():
        found = millionway.plan(**vars(chosen))
    if isinstance(found, dict):
        _print_plan(found, chosen)
        return
    print("\n".join(found.lines()))
    if chosen.verbose:
        about = found.question
        _print_plan(found.answers, replace(chosen, instances=about.instances, device_memory=about.device_memory))


def _print_plan(answers: dict[str, Any], chosen: Plan) -> None:
    """The parts of memory and communication, and what was measured."""
    names = {"hybrid": "rows split", "replicated": "rows replicated (DDP)"}
    table = Table("on each device", *names.values(), title=f"{chosen.instances:,} images on {chosen.devices} devices")
    for part in ("memory", "communication"):
        for line in dict.fromkeys(line for answer in answers.values() for line in getattr(answer, part)):
            table.add_row(line, *(_gigabytes(getattr(answers[name], part).get(line)) for name in names))
        total = (sum(getattr(answers[name], part).values()) for name in names)
        table.add_row(f"[bold]{part}[/bold]", *map(_gigabytes, total), end_section=True)
    if chosen.device_memory is not None:
        table.add_row("fits", *("yes" if answers[name].total <= chosen.device_memory else "no" for name in names))
        table.add_row("largest number of images", *(f"{answers[name].largest_instances:,}" for name in names))
    for part, seconds in answers["hybrid"].seconds.items():
        side = " (views of the full side)" if part == "encoder" else ""
        table.add_row(f"seconds a step, {part}{side}", f"{seconds:.2f}", "")
    search = answers["hybrid"].hardest_seconds
    if search is not None:
        how = "measured on fewer rows" if answers["hybrid"].seconds else "estimated"
        table.add_row(f"seconds an epoch, hardest classes ({how})", f"{search:.1f}", "")
    out.print(table)
    work = answers["hybrid"].work
    if work is not None:
        from millionway.train.limits import in_words

        table = Table("the classifier in a step", "at least", "limit", title="by published peaks, on each device")
        for line in in_words(work, answers["hybrid"].bounds):
            table.add_row(*line)
        out.print(table)


def _gigabytes(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e9:.3f} GB"


def embed(args: list[str]) -> None:
    """write the features of images as Parquet or npy"""
    chosen = parse(Embed, args, "embed")
    with _messages():
        print(f"written  {millionway.embed(**vars(chosen))}")


def export(args: list[str]) -> None:
    """write the encoder for other people's software: ONNX, timm, Hugging Face, plain PyTorch"""
    from millionway.exporting.export import how_to_load
    from millionway.model.encoder_file import encoder_path, read_encoder_file

    chosen = parse(Export, args, "export")
    with _messages():
        path = millionway.export(**vars(chosen))
    spec, _ = read_encoder_file(encoder_path(chosen.run))
    print(f"written  {path}\n\nTo load it:\n{how_to_load(spec, path, chosen.format, chosen.from_bytes)}")


def search(args: list[str]) -> None:
    """what looks like this picture?"""
    chosen = parse(Search, args, "search")
    with _messages():
        found = millionway.search(**vars(chosen))
    _print_lines(found, chosen.out)


def duplicates(args: list[str]) -> None:
    """groups of the same or nearly the same picture; leaks between two folders"""
    chosen = parse(Duplicates, args, "duplicates")
    with _messages():
        found = millionway.duplicates(**vars(chosen))
    _print_lines(found, chosen.out)
    if chosen.write_list is not None:
        print(f"written  {chosen.write_list}")


def outliers(args: list[str]) -> None:
    """what does not belong, with reasons"""
    chosen = parse(Outliers, args, "outliers")
    with _messages():
        found = millionway.outliers(**vars(chosen))
    _print_lines(found, chosen.out)


def make_map(args: list[str]) -> None:
    """place, cluster and neighbors of every image, as one Parquet file"""
    chosen = parse(Map, args, "map")
    with _messages():
        print(f"written  {millionway.map(**vars(chosen))}")


def explore(args: list[str]) -> None:
    """a page to walk through the images"""
    chosen = parse(Explore, args, "explore")
    with _messages():
        page = millionway.explore(**vars(chosen))
    if page is not None:
        print(f"written  {page}")


def _print_lines(found: Any, path: Path | None, most: int = 40) -> None:
    """The first lines of a table; all of them are in the file."""
    from millionway.console import printable

    names = [name for name in found.column_names if name not in ("id", "num_bytes", "against_id")]
    table = Table()
    for name in names:
        table.add_column(name, overflow="fold")  # a path that is cut off is none
    for line in found.slice(0, most).to_pylist():
        values = ("" if line[name] is None else line[name] for name in names)
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else printable(str(value)) for value in values))
    out.print(table)
    if found.num_rows > most:
        print(f"and {found.num_rows - most:,} more" + ("" if path else "; --out FILE.csv has them all"))
    if path is not None:
        print(f"written  {path}")


def index(args: list[str]) -> None:
    """number and check the images of a folder"""
    from millionway.console import printable
    from millionway.data.indexing import report_oddities

    chosen = parse(Index, args, "index")
    was_there = chosen.out.exists()
    with _messages():
        changes = millionway.index(**vars(chosen))
    manifest = changes.manifest
    for key, problem in list(manifest.problems.items())[:20]:
        print(printable(f"unreadable  {key}: {problem}"))
    with _messages():
        report_oddities(manifest, chosen.duplicates)
    if was_there:
        print(changes)
    print(
        f"{manifest.readable.sum():,} images, {len(manifest.problems):,} unreadable, "
        f"{manifest.num_duplicates + manifest.copies.sum():,} exact duplicates\nwritten  {chosen.out}"
    )


def bench(args: list[str]) -> None:
    """measure how fast images can be read and made into views"""
    from millionway.data.speed import advice

    with _messages():
        speeds = millionway.bench(**vars(parse(Bench, args, "bench")))
    table = Table("stage", "images per second")
    for stage, speed in speeds.items():
        table.add_row(stage, f"{speed:,.0f}")
    out.print(table)
    print(advice(speeds))


def demo(args: list[str]) -> None:
    """the whole path on 1,797 handwritten digits"""
    chosen = parse(Demo, args, "demo")
    with _messages():
        result = millionway.demo(**vars(chosen))
    table = Table("encoder", "k-NN, k = 200", "k-NN, k = 20", title="accuracy on ten digits; training sees no labels")
    for encoder, accuracies in result["accuracies"].items():
        table.add_row(encoder, f"{accuracies[200]:.1%}", f"{accuracies[20]:.1%}")
    out.print(table)
    print(f"run     {result['run']}\nreport  {result['report']}")
    print(f"page    millionway explore --run {result['run']}")


def study(args: list[str]) -> None:
    """run one of the paper's ablations on your data"""
    chosen = parse(Study, args, "study")
    with _messages():
        table = millionway.study(**vars(chosen))
    print(table.read_text())
    print(f"written  {table} and .json, .svg beside it")


def report(args: list[str]) -> None:
    """draw the page of a run again"""
    chosen = parse(Report, args, "report")
    with _messages():
        print(f"written  {millionway.report(chosen.run)}")


def presets(args: list[str]) -> None:
    """list the presets"""
    if args:
        raise ValueError(f"presets takes no argument, not {args[0]}")
    for name, function in PRESETS.items():
        data = " --data DIR" if name.startswith("imagenet") else ""
        # Commands stand alone and whole, however narrow the terminal is.
        print(f"{name}: {(function.__doc__ or '').strip()}\n  millionway pretrain --preset {name}{data}")
        print(f"  {measured(name)}\n")


def _messages() -> Any:
    from millionway.console import messages

    return messages()


VERBS: dict[str, Callable[[list[str]], None]] = {
    "pretrain": pretrain,
    "plan": plan,
    "evaluate": evaluate,
    "explore": explore,
    "search": search,
    "duplicates": duplicates,
    "outliers": outliers,
    "map": make_map,
    "embed": embed,
    "export": export,
    "index": index,
    "bench": bench,
    "study": study,
    "report": report,
    "presets": presets,
    "demo": demo,
}

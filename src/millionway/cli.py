"""The verbs: parse, call one function, print."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from rich.console import Console
from rich.table import Table

import millionway
from millionway.parallel.launcher import is_first_process, times_restarted
from millionway.settings import pretrain as config
from millionway.settings.checks import Duplicates, suggest
from millionway.settings.presets import PRESETS

Settings = TypeVar("Settings")
CONF = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
out = Console()


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
        from millionway.train.run import Interrupted, RunStopped

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


# --- pretrain ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MainSettings(config.Pretrain):
    """Pretrain an encoder on the images of a folder, without labels. --help-all shows the other settings too."""

    classifier: tyro.conf.Suppress[config.Classifier] = field(default_factory=config.Classifier)
    views: tyro.conf.Suppress[config.Views] = field(default_factory=config.Views)
    images: tyro.conf.Suppress[config.Images] = field(default_factory=config.Images)
    running: tyro.conf.Suppress[config.Running] = field(default_factory=config.Running)


def pretrain(args: list[str]) -> None:
    """train an encoder on a folder of images, without labels"""
    if "-h" in args or "--help" in args:
        _parse(MainSettings, args, "pretrain")
    args = ["--help" if arg == "--help-all" else arg for arg in args]
    args = _after_restart(args)
    resume_from = _value_of("--out", args) if "--resume" in args else None
    if "--resume" in args and resume_from is None and "--help" not in args:
        raise ValueError("--resume needs --out, the run folder to go on with")
    preset = None if resume_from else _value_of("--preset", args)
    first = millionway.first_settings(preset, Path(resume_from) if resume_from else None)
    default = config.with_settings(first, resume=False)  # so that --resume is a flag, and not --no-resume
    if not first.data:
        default = replace(default, data=tyro.MISSING, out=tyro.MISSING)
    chosen = _parse(config.Pretrain, args, "pretrain", default)
    folder = millionway.run_pretrain(chosen, first)
    if is_first_process():
        print(f"run     {folder}\nreport  {folder / 'report.html'}")


def _after_restart(args: list[str]) -> list[str]:
    """torchrun gives the same command again after a failure: then the run goes on, if it had begun.

    The settings stay, so that another run's folder is refused.
    """
    out = _value_of("--out", args)
    if times_restarted() and out and "--resume" not in args and (Path(out) / "config.json").exists():
        return [*args, "--resume"]
    return args


def _value_of(name: str, args: list[str]) -> str | None:
    """The value of a flag that is needed before the others can be read."""
    for place, arg in enumerate(args):
        if arg == name and place + 1 < len(args):
            return args[place + 1]
        if arg.startswith(name + "="):
            return arg[len(name) + 1 :]
    return None


def _parse(kind: type[Settings], args: list[str], verb: str, default: Settings | None = None) -> Settings:
    options: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(kind, args=args, prog=f"millionway {verb}", config=CONF, **options)


# --- the other verbs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluate:
    """Score an encoder. health needs no labels, detect needs boxes, the others need a label for every image."""

    protocol: tyro.conf.Positional[str]
    """knn, linear, few-labels, finetune, retrieval, detect, health, or all that the data allows"""
    run: config.Chosen[Path] = None
    """the run folder, or an encoder.safetensors"""
    encoder: config.Chosen[str] = None
    """instead of a run: torchvision/NAME or timm/NAME"""
    weights: config.Chosen[str] = None
    """its weights: a file, random (the default), or supervised (the library's own download)"""
    image_size: config.Chosen[int] = None
    """side of the images for such an encoder; by default 224"""
    data: config.Chosen[str] = None
    """labeled images (names of the first folders are the labels); by default the run's own. detect: a folder in VOC
    layout, or a COCO .json beside its images"""
    test_data: config.Chosen[str] = None
    """the images that ask; by default the data's test split, or a held-out fifth of each class"""
    out: config.Chosen[Path] = None
    """folder for PROTOCOL.json; by default evaluation/ in the run folder"""
    data_root: config.Chosen[Path] = None
    """where named sets are stored"""
    max_unreadable: config.Chosen[float] = None
    """stop if a larger share of the images cannot be read; by default 0.01, or the run's own"""
    seed: int = 0
    """of the held-out part, the subsets and the training of classifiers"""
    seeds: int = 1
    """how many seeds, from --seed on: mean, spread and 95 % interval"""
    epochs: config.Chosen[int] = None
    """of the training of a classifier; by default the protocol's"""
    batch_size: config.Chosen[int] = None
    """of that training; by default the protocol's"""
    lr: config.Chosen[float] = None
    """of that training (few-labels: of the classifier); by default the protocol's"""
    weight_decay: config.Chosen[float] = None
    """of that training; by default the protocol's"""
    sweep: bool = False
    """linear: choose the learning rate on a held-out tenth of the training images"""
    augment: bool = False
    """linear: train on random crops, which encodes all images again in every epoch"""
    shares: tuple[float, ...] = (0.01, 0.1)
    """few-labels: of the labels"""
    per_class: config.Chosen[int] = None
    """few-labels: so many of each class instead of a share"""
    crop_min: float = 0.08
    """smallest area of a random crop in training, as a share of the image"""
    flip: float = 0.5
    """probability of a mirror image in training"""
    detector: Literal["c4", "fpn"] = "c4"
    """detect: Faster R-CNN as in MoCo's transfer, or with torchvision's feature pyramid"""
    detect_size: int = 800
    """detect: shorter side of an image; training takes 0.6 to 1 of it"""
    iterations: int = 24_000
    """detect: steps of training"""
    train_split: str = "trainval"
    """detect: list in ImageSets/Main to train on"""
    test_split: str = "test"
    """detect: list in ImageSets/Main to test on"""
    bad_boxes: Literal["error", "drop"] = "error"
    """detect: what to do with boxes outside their image or without area"""
    cache: bool = True
    """whether features are kept for the next time"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to compute"""
    threads: config.Chosen[int] = None
    """CPU threads"""


def evaluate(args: list[str]) -> None:
    """score an encoder: knn, linear, few-labels, finetune, retrieval, detect, health"""
    from millionway.evaluation.results import rows

    chosen = _parse(Evaluate, args, "evaluate")
    with _messages():
        numbers = millionway.evaluate(**vars(chosen))
    table = Table("protocol", "", "value")
    for row in rows(numbers if chosen.protocol == "all" else {chosen.protocol: numbers}):
        table.add_row(*row)
    out.print(table)
    folder = chosen.out or (chosen.run / "evaluation" if chosen.run and chosen.run.is_dir() else None)
    if folder is not None:
        print(f"written  {folder / ('' if chosen.protocol == 'all' else chosen.protocol + '.json')}")


@dataclass(frozen=True)
class Plan:
    """Say what a run would take of each device: memory, communication, the largest number of images."""

    instances: str
    """number of images, for example 1281167 or 14.2M"""
    dim: int = 128
    """length of an embedding"""
    batch_size: int = 4096
    """images per step over all devices"""
    devices: int = 1
    """processes that train together"""
    device_memory: config.Chosen[str] = None
    """of each, for example 32GB; says whether it fits, and how many images would"""
    encoder: str = "resnet50"
    """as for pretrain"""
    image_size: int = 224
    """side of a view in pixels"""
    hardest: int = 100
    """K of the smoothed labels, 0 without"""
    storage: config.Storage = "float32"
    """how rows and their momentum are kept"""
    num_views: int = 2
    """of an image per step"""
    micro_batch: config.Chosen[int] = None
    """images encoded at a time on each device"""
    device: Literal["cpu", "cuda"] = "cuda"
    """what kind of device"""
    calibrate: bool = False
    """measure the seconds of a step on the present device"""


def plan(args: list[str]) -> None:
    """say what a run would take: memory, communication, the largest number of images"""
    from millionway.train.plan import number

    chosen = _parse(Plan, args, "plan")
    answers = millionway.plan(**vars(chosen))
    names = {"hybrid": "rows shared out", "replicated": "rows replicated (DDP)"}
    table = Table("on each device", *names.values(), title=f"{chosen.instances} images on {chosen.devices} devices")
    for part in ("memory", "communication"):
        for line in dict.fromkeys(line for answer in answers.values() for line in getattr(answer, part)):
            table.add_row(line, *(_gigabytes(getattr(answers[name], part).get(line)) for name in names))
        total = (sum(getattr(answers[name], part).values()) for name in names)
        table.add_row(f"[bold]{part}[/bold]", *map(_gigabytes, total), end_section=True)
    if chosen.device_memory is not None:
        limit = number(chosen.device_memory)
        table.add_row("fits", *("yes" if answers[name].total <= limit else "no" for name in names))
        table.add_row("largest number of images", *(f"{answers[name].largest_instances:,}" for name in names))
    for part, seconds in answers["hybrid"].seconds.items():
        table.add_row(f"seconds a step, {part}", f"{seconds:.2f}", "")
    search = answers["hybrid"].hardest_seconds
    if search is not None:
        how = "measured on fewer rows" if chosen.calibrate else "estimated"
        table.add_row(f"seconds an epoch, hardest classes ({how})", f"{search:.1f}", "")
    out.print(table)


def _gigabytes(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e9:.3f} GB"


@dataclass(frozen=True)
class Embed:
    """Write the features of all images of a folder."""

    run: Path
    """the run folder, or an encoder.safetensors"""
    data: str
    """a folder, a list of files or a named set"""
    out: Path
    """a name that ends in .parquet or .npy"""
    data_root: config.Chosen[Path] = None
    """where named sets are stored"""
    max_unreadable: float = 0.01
    """stop if a larger share of the images cannot be read"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to compute"""
    threads: config.Chosen[int] = None
    """CPU threads"""


def embed(args: list[str]) -> None:
    """write the features of images as Parquet or npy"""
    chosen = _parse(Embed, args, "embed")
    with _messages():
        print(f"written  {millionway.embed(**vars(chosen))}")


@dataclass(frozen=True)
class Export:
    """Write the encoder for other people's software."""

    run: Path
    """the run folder, or an encoder.safetensors"""
    out: Path
    """the file or folder to make"""
    format: Literal["safetensors", "torch", "onnx", "pt2", "timm", "huggingface", "detectron2"] = "safetensors"
    """safetensors, torch: weights by name. onnx, pt2: the whole network in one file. timm, huggingface: a folder with a
    model card. detectron2: for MODEL.WEIGHTS there"""
    from_bytes: bool = False
    """onnx and pt2 take RGB bytes of any size: crop, resize and normalization are in the file"""


def export(args: list[str]) -> None:
    """write the encoder for other people's software: ONNX, timm, Hugging Face, plain PyTorch"""
    from millionway.exporting.export import how_to_load
    from millionway.model.encoder_file import encoder_path, read_encoder_file

    chosen = _parse(Export, args, "export")
    with _messages():
        path = millionway.export(**vars(chosen))
    spec, _ = read_encoder_file(encoder_path(chosen.run))
    print(f"written  {path}\n\nTo load it:\n{how_to_load(spec, path, chosen.format, chosen.from_bytes)}")


@dataclass(frozen=True)
class Index:
    """Number the images of a folder, check that each can be read, and write the list.

    Again with the same --out: only what is new or has changed is read, and every image keeps its number.
    """

    data: Annotated[str, tyro.conf.Positional]
    """a folder, a list of files, shards, tables, arrays, an address or a named set"""
    out: Path
    """the list to make or to bring up to date, for example manifest.arrow"""
    duplicates: Duplicates = "report"
    """images with the same bytes. merge: one row for all; report: say how many; keep: say nothing"""
    data_root: config.Chosen[Path] = None
    """where named sets are stored"""
    threads: config.Chosen[int] = None
    """files read at the same time; by default one per core"""


def index(args: list[str]) -> None:
    """number and check the images of a folder"""
    from millionway.console import printable
    from millionway.data.indexing import report_oddities

    chosen = _parse(Index, args, "index")
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


@dataclass(frozen=True)
class Bench:
    """How fast are my images? Some are read and made into views, for a few seconds each."""

    what: Annotated[Literal["data"], tyro.conf.Positional]
    data: str
    """a folder, a list of files, shards, tables, arrays, an address or a named set"""
    image_size: config.Chosen[int] = None
    """side of a view in pixels; by default that of small images, else 224"""
    data_root: config.Chosen[Path] = None
    """where named sets are stored"""
    threads: config.Chosen[int] = None
    """files read at the same time; by default one per core"""


def bench(args: list[str]) -> None:
    """measure how fast images can be read and made into views"""
    from millionway.data.speed import advice

    with _messages():
        speeds = millionway.bench(**vars(_parse(Bench, args, "bench")))
    table = Table("stage", "images per second")
    for stage, speed in speeds.items():
        table.add_row(stage, f"{speed:,.0f}")
    out.print(table)
    print(advice(speeds))


@dataclass(frozen=True)
class Demo:
    """Pretrain on 1,797 handwritten digits and score the encoder: the whole path in about two minutes."""

    out: Path = Path("runs/demo")
    """the run folder to make; a number is added if it exists"""
    seed: int = 1
    """everything random follows from it"""
    epochs: config.Chosen[int] = None
    """passes over all images; by default the preset's"""


def demo(args: list[str]) -> None:
    """the whole path on 1,797 handwritten digits"""
    chosen = _parse(Demo, args, "demo")
    with _messages():
        result = millionway.demo(**vars(chosen))
    table = Table("encoder", "k-NN, k = 200", "k-NN, k = 20", title="accuracy on ten digits; training sees no labels")
    for encoder, accuracies in result["accuracies"].items():
        table.add_row(encoder, f"{accuracies[200]:.1%}", f"{accuracies[20]:.1%}")
    out.print(table)
    print(f"run     {result['run']}\nreport  {result['report']}")


@dataclass(frozen=True)
class Study:
    """Run one of the paper's ablations on your data: components, initialization, sampling, smoothing,
    prior-similarity, instance-vs-semantic. Start it again to go on: finished runs are kept."""

    name: tyro.conf.Positional[str]
    """the study"""
    out: Path
    """folder of the study; several studies may share it, and their runs"""
    data: config.Chosen[str] = None
    """labeled images; by default the preset's"""
    preset: config.Chosen[str] = None
    """what all runs have in common; `millionway presets` lists them"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """each setting is run with each of them"""
    epochs: tuple[int, ...] = (10,)
    """of a run; several for the initialization study, the others take the largest"""
    jobs: int = 1
    """runs at a time; the cores are divided among them"""
    cells: tuple[str, ...] = ()
    """only these rows of the study's table, by name"""
    test_data: config.Chosen[str] = None
    """other labeled images that ask; by default the data's test split, or a held-out fifth"""
    max_images: config.Chosen[int] = None
    """train on at most so many of the images, always the same ones; by default all"""
    set: tuple[str, ...] = ()
    """other settings of pretrain for all runs, such as lr=0.06 row_lr=20"""


def study(args: list[str]) -> None:
    """run one of the paper's ablations on your data"""
    chosen = vars(_parse(Study, args, "study"))
    more = dict(_assignment(text) for text in chosen.pop("set"))
    given = {name: chosen.pop(name) for name in ("test_data", "max_images")}
    given = {name: value for name, value in given.items() if value is not None}
    twice = sorted(more.keys() & (chosen.keys() | given.keys()))
    if twice:
        raise ValueError(f"--set {twice[0]}: use {config.flag(twice[0])}")
    with _messages():
        table = millionway.study(**chosen, **given, **more)
    print(table.read_text())
    print(f"written  {table} and .json, .svg beside it")


def _assignment(text: str) -> tuple[str, Any]:
    """("lr", 0.06) of "lr=0.06"."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text}: write NAME=VALUE, such as lr=0.06")
    try:
        return name.replace("-", "_"), json.loads(value)
    except json.JSONDecodeError:
        return name.replace("-", "_"), value


@dataclass(frozen=True)
class Report:
    """Draw the page of a run, RUN/report.html, from its files."""

    run: Path
    """the run folder"""


def report(args: list[str]) -> None:
    """draw the page of a run again"""
    print(f"written  {millionway.report(_parse(Report, args, 'report').run)}")


def presets(args: list[str]) -> None:
    """list the presets"""
    from millionway.settings.presets import measured

    if args:
        raise ValueError(f"presets takes no argument, not {args[0]}")
    table = Table("preset", "what", "command", "measured", show_lines=True)
    for name, function in PRESETS.items():
        command = f"millionway pretrain --preset {name}" + (" --data DIR" if name.startswith("imagenet") else "")
        table.add_row(name, (function.__doc__ or "").strip(), command, measured(name))
    out.print(table)


def _messages() -> Any:
    from millionway.console import messages

    return messages()


VERBS: dict[str, Callable[[list[str]], None]] = {
    "pretrain": pretrain,
    "plan": plan,
    "evaluate": evaluate,
    "embed": embed,
    "export": export,
    "index": index,
    "bench": bench,
    "study": study,
    "report": report,
    "presets": presets,
    "demo": demo,
}

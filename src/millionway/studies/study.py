"""A study, top to bottom: check, run what is missing, write numbers, table and picture."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.live import Live
from rich.table import Table

from millionway.console import console, track
from millionway.data.dataset import open_dataset
from millionway.data.kinds.choose import open_source
from millionway.data.source import Source
from millionway.evaluation.features import no_labels
from millionway.files import write_whole
from millionway.machine import choose_device, describe_environment, num_cores
from millionway.settings import pretrain as settings
from millionway.settings.checks import flag, suggest
from millionway.settings.presets import PAPER
from millionway.settings.pretrain import Pretrain
from millionway.settings.resolve import Facts, resolve
from millionway.settings.stored import first_settings
from millionway.settings.study import Study
from millionway.studies import markdown
from millionway.studies.cells import CellsFailed, Job, run_jobs, short_name
from millionway.studies.grids import PRIORS, STUDIES, VARIED, Cell, Setting
from millionway.studies.similarity import prior_similarity
from millionway.train.setup import check_test_data

log = logging.getLogger("millionway")

SHOWN_EPOCHS = (1, 2, 5, 10, 25, 50, 100, 200)

PAPER_LOSS = {name: PAPER[name] for name in ("optimizer", "pairs", "precision", "first_size")}
"""The claims are about these; a user may still set others."""


def study(asked: Study) -> Path:
    """Run a study and return its table. Finished runs in the folder are taken as they are."""
    name, seeds, epochs, out = asked.name, asked.seeds, asked.epochs, asked.out
    if name not in STUDIES:
        raise ValueError(f"study {name}: no such study. {suggest(name, STUDIES)}")
    _check_different(seeds=seeds, epochs=epochs)
    _check_owned(asked.changes, VARIED | {"seed", "threads", "labels"})
    changes = PAPER_LOSS | {"eval_every": 1} | asked.changes
    config = _common_settings(asked, changes)
    device = choose_device(config.running.device)
    source = open_source(config.data, config.images.data_root, max_images=config.images.max_images)
    cells = STUDIES[name].cells(_setting(config, len(source), epochs, device))
    # The others take a number of views or a batch size from the user, this one from its rows and --batch-size.
    _check_owned(asked.changes, {key for cell in cells for key in cell.settings} - {"batch_size"})
    known = [cell.name for cell in cells]
    for row in asked.cells:
        if row not in known:
            help_text = suggest(row, known) if known else "It always measures all of its rows."
            raise ValueError(f"--cells {row}: study {name} has no such row. {help_text}")
    chosen = [cell for cell in cells if not asked.cells or cell.name in asked.cells]
    _check(name, config, chosen, source, device)
    out.mkdir(parents=True, exist_ok=True)
    _compare_base(out / "base.json", config)
    failed = None
    if name == "prior-similarity":
        numbers = _similarities(config, out, source, seeds, device)
        table = markdown.similarity_table(numbers)
    else:
        jobs = [Job(cell, seed, out) for cell in chosen for seed in seeds]
        with _live(name, chosen, seeds, jobs) as show:
            try:
                run_jobs(jobs, changes, asked.jobs, num_cores(), show)
            except CellsFailed as error:
                failed = error
        numbers = _numbers([Job(cell, seed, out) for cell in cells for seed in seeds])
        if failed is not None and not any(numbers.values()):
            raise failed
        table = _table(name, cells, numbers, epochs)
    path = _write(name, out, table, numbers, config, len(source))
    if failed is not None:
        raise CellsFailed(f"{failed} The others are in {path}.")
    return path


def _setting(config: Pretrain, num_images: int, epochs: tuple[int, ...], device: torch.device) -> Setting:
    own = config.classifier.prior
    prior = Setting.prior if own == "random" else own
    batch_size = resolve(
        config, Facts(num_images, None, device.type != "cpu", num_cores=num_cores())
    ).training.batch_size
    assert batch_size is not None
    return Setting(num_images, epochs, prior, batch_size)


def _check_owned(changes: dict[str, Any], owned: set[str]) -> None:
    for key in sorted(changes.keys() & owned):
        raise ValueError(f"--set {key}: the study itself chooses it")


def _common_settings(asked: Study, changes: dict[str, Any]) -> Pretrain:
    """What all runs have in common."""
    config = settings.with_settings(first_settings(asked.preset, None), **changes, out=asked.out)
    if not config.data:
        raise ValueError("--data is missing: a folder of images, a list of files, or a named set such as digits")
    settings.check(config)
    return config


def _check_different(**lists: tuple[int, ...]) -> None:
    for name, values in lists.items():
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{flag(name)} must be different numbers, not {' '.join(map(str, values))}")


def _check(name: str, config: Pretrain, cells: list[Cell], source: Source, device: torch.device) -> None:
    """Refuse before any training what one of the runs would refuse."""
    if name != "prior-similarity":
        if source.labels is None:
            raise no_labels(f"study {name}", config.data)
        check_test_data(config, source)
    for cell in cells or [Cell("", {})]:
        with_cell = settings.with_settings(config, **cell.settings)
        settings.check(with_cell)
        try:
            resolve(with_cell, Facts(len(source), None, device.type != "cpu", num_cores=num_cores()))
        except ValueError as error:
            raise ValueError(f"study {name}, {cell.name or 'all'}: {error}") from None


def _compare_base(path: Path, config: Pretrain) -> None:
    """All runs of a folder have the same settings but for what its studies vary.

    A preset's name says nothing beyond its values, and every run has epochs of its own. A setting that came later had
    its default value then.
    """
    free = settings.FREE_ON_RESUME | {"preset", "epochs"}
    here = {name: value for name, value in settings.flat(config).items() if name not in free}
    here |= {"data": short_name(config.data), "test_data": short_name(config.images.test_data)}
    here |= {"eval_images": config.running.eval_images, "init_from": config.init_from}
    text = json.dumps(here, indent=1, default=str)
    holds_runs = any(True for part in ("cells", "runs") for _ in (path.parent / part).glob("*"))
    now, then = json.loads(text), json.loads(path.read_text()) if holds_runs and path.exists() else json.loads(text)
    defaults = json.loads(json.dumps(settings.flat(Pretrain(config.data, config.out)) | PAPER_LOSS, default=str))
    changed = [
        f"{flag(key)} was {then.get(key, defaults.get(key))}, now {now[key]}"
        for key in now
        if then.get(key, defaults.get(key)) != now[key]
    ]
    if changed:
        raise ValueError(f"--out {path.parent} holds runs with other settings: {', '.join(changed)}. Choose another.")
    write_whole(path, text + "\n")


def _similarities(
    config: Pretrain, out: Path, source: Source, seeds: tuple[int, ...], device: torch.device
) -> markdown.Numbers:
    """In this process; each finished one is kept."""
    (out / "cells").mkdir(exist_ok=True)
    numbers: markdown.Numbers = {}
    dataset = None
    for prior in PRIORS:
        numbers[prior] = {}
        for seed in seeds:
            path = out / "cells" / f"similarity_{prior}_s{seed}.json"
            if not path.exists():
                dataset = dataset or open_dataset(
                    config.data,
                    source=source,
                    num_threads=num_cores(),
                    max_unreadable=config.images.max_unreadable,
                    duplicates=config.images.duplicates,
                    progress=track,
                )
                seeded = settings.with_settings(config, seed=seed)
                result = prior_similarity(seeded, dataset, prior, device, track)
                environment = json.loads(describe_environment(device))
                write_whole(path, json.dumps({**result, "environment": environment}, indent=1) + "\n")
            numbers[prior][seed] = json.loads(path.read_text())
    return numbers


@contextmanager
def _live(name: str, cells: list[Cell], seeds: tuple[int, ...], jobs: list[Job]) -> Iterator[Callable[[], None]]:
    """A table that follows the runs; without a terminal, a line for each that ends."""
    told = {job.label for job in jobs if job.result.exists()}
    by_place = {(job.cell.name, job.seed): job for job in jobs}

    def table() -> Table:
        grid = Table("", *(f"seed {seed}" for seed in seeds), title=f"study {name}")
        for cell in cells:
            grid.add_row(cell.name, *(by_place[cell.name, seed].state() for seed in seeds))
        return grid

    def tell() -> None:
        for job in jobs:
            if job.label not in told and job.result.exists():
                told.add(job.label)
                log.info("%s, seed %d: %s (%d of %d)", job.cell.name, job.seed, job.state(), len(told), len(jobs))

    if not console.is_terminal:
        yield tell
        return
    with Live(table(), console=console, auto_refresh=False) as live:
        yield lambda: live.update(table(), refresh=True)


def _numbers(jobs: list[Job]) -> markdown.Numbers:
    """Of all runs that are finished, also of rows that were not asked for this time."""
    numbers: markdown.Numbers = {job.cell.name: {} for job in jobs}
    for job in jobs:
        if job.result.exists():
            numbers[job.cell.name][job.seed] = json.loads(job.result.read_text())
    return numbers


def _table(name: str, cells: list[Cell], numbers: markdown.Numbers, epochs: tuple[int, ...]) -> str:
    if name == "instance-vs-semantic":
        return markdown.correlation_table(numbers)
    papers = {cell.name: cell.paper for cell in cells if cell.paper is not None}
    along = [epoch for epoch in SHOWN_EPOCHS if epoch <= max(epochs)] if name == "initialization" else []
    study = STUDIES[name]
    pairs = study.pairs or [(cell.name, study.reference) for cell in cells if cell.name != study.reference]
    endings = ["", *(f", {num} epochs" for num in epochs)]  # rows of runs of different length
    pairs = [(row + ending, reference + ending) for ending in endings for row, reference in pairs]
    accuracies = markdown.accuracy_table(numbers, papers, study.paper_epochs, along)
    return f"{accuracies}\n\n{markdown.difference_table(numbers, pairs, along)}".strip()


def _write(name: str, out: Path, table: str, numbers: markdown.Numbers, config: Pretrain, num_images: int) -> Path:
    seeds = sorted({seed for results in numbers.values() for seed in results})
    commits = {r["environment"]["commit"] or "unknown" for results in numbers.values() for r in results.values()}
    text = (
        f"**{STUDIES[name].question}** {short_name(config.data)}, {num_images:,} images, encoder "
        f"{config.model.encoder or 'by default'}, seeds {', '.join(map(str, seeds))}. Percent, mean ± standard "
        f"deviation over seeds; differences are paired by seed, ± is the 95 % interval.\n\n{table}\n\n"
        f"Commits {', '.join(sorted(commits))}.\n"
    )
    result = {"study": name, "num_images": num_images, "numbers": numbers}
    write_whole(out / f"{name}.json", json.dumps(result, indent=1) + "\n")
    write_whole(out / f"{name}.md", text)
    markdown.draw(name, STUDIES[name].question, numbers, out / f"{name}.svg")
    return out / f"{name}.md"

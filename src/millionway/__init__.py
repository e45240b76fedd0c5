"""Pretrain a vision encoder on your own unlabeled images by telling every one of them apart.

The verbs of the command line as functions. What they need is imported when they are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from millionway.data.indexing import Changes
    from millionway.model.encoder import Encoder
    from millionway.settings.checks import Duplicates
    from millionway.settings.pretrain import Pretrain

__version__ = "0.1.0"
__all__ = [
    "bench",
    "demo",
    "embed",
    "evaluate",
    "export",
    "index",
    "load_encoder",
    "plan",
    "pretrain",
    "report",
    "study",
]


def pretrain(
    data: str | Path | None = None,
    out: str | Path | None = None,
    preset: str | None = None,
    *,
    resume: bool = False,
    **settings: Any,
) -> Path:
    """Pretrain an encoder and write its report; returns the run folder.

    `settings` are those of the command line, with underscores:
    `millionway.pretrain("photos", "runs/photos", epochs=50, image_size=96)`.
    """
    from millionway.settings.pretrain import with_settings

    if data is not None:
        settings["data"] = str(data)
    if out is not None:
        settings["out"] = Path(out)
    if resume and out is None:
        raise ValueError("resume needs out, the run folder to go on with")
    first = first_settings(preset, settings["out"] if resume else None)
    return run_pretrain(with_settings(first, **settings), first)


def first_settings(preset: str | None, resume_from: Path | None) -> Pretrain:
    """What the user's own settings are laid over: the run to go on with, a preset, or the defaults."""
    from millionway.settings import presets
    from millionway.settings import pretrain as config
    from millionway.train.setup import run_config

    if resume_from is not None:
        return config.with_settings(run_config(resume_from), resume=True, out=resume_from)
    if preset is not None:
        return presets.preset(preset)
    return config.Pretrain(data="", out=Path())


def run_pretrain(config: Pretrain, first: Pretrain) -> Path:
    """Pretrain with finished settings, then write the report."""
    from millionway.parallel.launcher import is_first_process
    from millionway.train.run import pretrain as run
    from millionway.train.setup import check_resume

    if not config.data:
        raise ValueError("--data is missing: a folder of images, a list of files, or a named set such as digits")
    if config.out == Path():
        raise ValueError("--out is missing: the run folder to make")
    if config.resume:
        check_resume(first, config)
    folder = run(config)
    if is_first_process():
        report(folder)
    return folder


def evaluate(
    protocol: str,
    run: str | Path | None = None,
    data: str | Path | None = None,
    *,
    encoder: str | None = None,
    weights: str | Path | None = None,
    image_size: int | None = None,
    test_data: str | Path | None = None,
    out: str | Path | None = None,
    data_root: Path | None = None,
    max_unreadable: float | None = None,
    seed: int = 0,
    seeds: int = 1,
    cache: bool = True,
    device: str = "auto",
    threads: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Score an encoder by a protocol, or by all that the data allows. Returns its numbers.

    Protocols: knn, linear, few-labels, finetune, retrieval, detect, health.

    The encoder is that of a run, or `encoder` (torchvision/NAME, timm/NAME) with `weights` (a file, random, or
    supervised). data: by default what the run was trained on. test_data: by default the data's test split, or a
    held-out fifth. The file PROTOCOL.json goes to RUN/evaluation, or to `out`. seeds: how many, from `seed` on; with
    several the numbers are means. options: those of the command line, such as epochs, lr, shares.
    """
    from millionway.console import track
    from millionway.evaluation import protocols
    from millionway.evaluation.feature_cache import FeatureCache, default_folder
    from millionway.evaluation.subject import open_subject
    from millionway.evaluation.work import Options
    from millionway.train.setup import run_config

    if seeds < 1:
        raise ValueError(f"--seeds must be positive, not {seeds}")
    compute = _compute(device, threads)
    run = None if run is None else Path(run)
    subject = open_subject(run, encoder, None if weights is None else str(weights), image_size, seed)
    manifest = max_images = None
    if data is None:
        if run is None:
            raise ValueError("--data is missing: labeled images")
        stored = run_config(run)
        max_images, test_data = stored.images.max_images, test_data or stored.images.test_data
        data, data_root, manifest = stored.data, data_root or stored.images.data_root, run / "manifest.arrow"
        max_unreadable = stored.images.max_unreadable if max_unreadable is None else max_unreadable
    folder = Path(out) if out is not None else None if subject.run is None else subject.run / "evaluation"
    results = protocols.evaluate(
        protocol,
        subject,
        str(data),
        None if test_data is None else str(test_data),
        out=folder,
        data_root=data_root,
        manifest=manifest,
        max_images=max_images,
        max_unreadable=0.01 if max_unreadable is None else max_unreadable,
        seeds=tuple(range(seed, seed + seeds)),
        options=Options(**options),
        cache=FeatureCache(default_folder()) if cache else None,
        progress=track,
        **compute,
    )
    return results if protocol == "all" else results[protocol]


def plan(
    instances: int | str,
    dim: int = 128,
    batch_size: int = 4096,
    devices: int = 1,
    device_memory: int | str | None = None,
    *,
    encoder: str = "resnet50",
    image_size: int = 224,
    hardest: int = 100,
    storage: str = "float32",
    num_views: int = 2,
    micro_batch: int | None = None,
    device: str = "cuda",
    calibrate: bool = False,
) -> dict[str, Any]:
    """Memory, communication and largest number of images of a run, with rows shared out (hybrid) or replicated.

    Numbers may be written as "14.2M" and "32GB". calibrate: measure the seconds of a step on the present device.
    """
    import torch

    from millionway.settings.pretrain import Storage
    from millionway.train import plan as planning

    if storage not in get_args(Storage):
        raise ValueError(f"storage is one of {', '.join(get_args(Storage))}, not {storage}")
    question = planning.Question(
        planning.number(instances),
        dim,
        batch_size,
        devices,
        None if device_memory is None else planning.number(device_memory),
        encoder,
        image_size,
        hardest,
        getattr(torch, storage),
        num_views,
        micro_batch,
        device,
    )
    return planning.plan(question, calibrate)


def embed(
    run: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    data_root: Path | None = None,
    max_unreadable: float = 0.01,
    device: str = "auto",
    threads: int | None = None,
) -> Path:
    """Features of all images as .parquet or .npy."""
    from millionway.console import track
    from millionway.evaluation.embed import embed as run_embed

    return run_embed(
        Path(run),
        str(data),
        Path(out),
        data_root=data_root,
        max_unreadable=max_unreadable,
        progress=track,
        **_compute(device, threads),
    )


def export(run: str | Path, out: str | Path, *, format: str = "safetensors", from_bytes: bool = False) -> Path:
    """The encoder for other software: safetensors, torch, onnx, pt2, timm, huggingface, detectron2.

    from_bytes: onnx and pt2 take RGB bytes of any size, with crop, resize and normalization inside.
    """
    from millionway.exporting.export import export as run_export

    return run_export(Path(run), Path(out), format, from_bytes)


def index(
    data: str | Path,
    out: str | Path,
    *,
    data_root: Path | None = None,
    threads: int | None = None,
    duplicates: Duplicates = "report",
) -> Changes:
    """Number the images, check that each can be read, and write the list; or bring it up to date, if it is there."""
    from millionway.console import track
    from millionway.data.indexing import index as run_index
    from millionway.data.kinds.choose import open_source
    from millionway.machine import num_cores

    return run_index(open_source(str(data), data_root), Path(out), threads or num_cores(), track, duplicates)


def bench(
    what: str,
    data: str | Path,
    *,
    image_size: int | None = None,
    data_root: Path | None = None,
    threads: int | None = None,
) -> dict[str, float]:
    """Images per second of loading `data`: reading, two views each, and views with --cache."""
    import torch

    from millionway.console import track
    from millionway.data.speed import measure
    from millionway.machine import choose_device, num_cores
    from millionway.settings.pretrain import Views

    if what != "data":
        raise ValueError(f"bench measures data, not {what!r}")
    num_threads = threads or num_cores()
    torch.set_num_threads(num_threads)
    return measure(
        str(data),
        image_size,
        Views().augmentation,
        choose_device("auto"),
        num_threads,
        data_root=data_root,
        progress=track,
    )


def report(run: str | Path) -> Path:
    """Draw the run's page, RUN/report.html, from its files."""
    from millionway.reporting.page import write_report

    return write_report(Path(run))


def demo(out: str | Path = "runs/demo", *, seed: int = 1, epochs: int | None = None) -> dict[str, Any]:
    """Pretrain on 1,797 handwritten digits and score the encoder; a number is added to `out` if it exists.

    Returns `run`, `report`, and k-NN accuracies as {encoder: {k: accuracy}}.
    """
    from millionway.reporting.metrics import read_metrics

    folder, number = Path(out), 1
    while folder.exists():
        number += 1
        folder = Path(out).with_name(f"{Path(out).name}-{number}")
    changes: dict[str, Any] = {} if epochs is None else {"epochs": epochs}
    pretrain(out=folder, preset="digits", seed=seed, **changes)
    trained = evaluate("knn", folder, seed=seed)
    evaluate("linear", folder, seed=seed)
    first = next(line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "evaluation")
    accuracies = {
        "none (chance)": {200: trained["chance"], 20: trained["chance"]},
        "random": {k: first[f"random_knn_{k}"] for k in (200, 20)},
        "pretrained": {k: trained[f"knn_{k}"] for k in (200, 20)},
    }
    return {"run": folder, "report": report(folder), "accuracies": accuracies}


def study(
    name: str,
    data: str | Path | None = None,
    out: str | Path = "",
    preset: str | None = None,
    *,
    seeds: Sequence[int] = (1, 2, 3),
    epochs: Sequence[int] = (10,),
    jobs: int = 1,
    cells: Sequence[str] = (),
    **settings: Any,
) -> Path:
    """Run one of the paper's ablations on a data set and write NAME.json, NAME.md and NAME.svg into `out`.

    cells: only these rows of its table, by name. Runs that `out` holds already are not run again. `settings` are those
    of `pretrain`, for all runs alike.
    """
    from millionway.machine import choose_device
    from millionway.settings.pretrain import with_settings
    from millionway.studies.study import study as run_study

    if data is not None:
        settings["data"] = str(data)
    settings.setdefault("eval_every", 1)
    config = with_settings(first_settings(preset, None), **settings, out=Path(out))
    if not config.data:
        raise ValueError("--data is missing: a folder of images, a list of files, or a named set such as digits")
    if not str(out):
        raise ValueError("--out is missing: the folder of the study")
    changes = {**settings, "preset": preset}
    device = choose_device(config.running.device)
    return run_study(name, config, changes, tuple(seeds), tuple(epochs), jobs, device, tuple(cells))


def load_encoder(path: str | Path) -> Encoder:
    """The trained encoder as a torch module: colors from 0 to 1 in, features out. `path`: run folder or file."""
    from millionway.model.encoder_file import load_encoder as load

    return load(path)


def _compute(device: str, threads: int | None) -> dict[str, Any]:
    import torch

    from millionway.machine import choose_device, num_cores

    torch.set_num_threads(threads or num_cores())
    return {"device": choose_device(device), "num_threads": threads or num_cores()}

"""Pretrain a vision encoder on your own unlabelled images by telling every one of them apart.

The verbs of the command line as functions. What they need is imported when they are called.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millionway.config import Pretrain
    from millionway.data.manifest import Manifest
    from millionway.model.encoder import Encoder

__version__ = "0.1.0"
__all__ = ["embed", "evaluate", "export", "index", "load_encoder", "pretrain", "report"]


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
    from millionway.config import with_settings

    if data is not None:
        settings["data"] = str(data)
    if out is not None:
        settings["out"] = Path(out)
    first = first_settings(preset, settings.get("out") if resume else None)
    return run_pretrain(with_settings(first, **settings), first)


def first_settings(preset: str | None, resume_from: Path | None) -> Pretrain:
    """What the user's own settings are laid over: the run to go on with, a preset, or the defaults."""
    from millionway import config, presets
    from millionway.train.setup import resume_config

    if resume_from is not None:
        return resume_config(resume_from)
    if preset is not None:
        return presets.preset(preset)
    return config.Pretrain(data="", out=Path())


def run_pretrain(config: Pretrain, first: Pretrain) -> Path:
    """Pretrain with finished settings, then write the report."""
    from millionway.train.pretrain import pretrain as run
    from millionway.train.setup import check_resume

    if not config.data:
        raise ValueError("--data is missing: a folder of images, a list of files, or a named set such as digits")
    if config.out == Path():
        raise ValueError("--out is missing: the run folder to make")
    if config.resume:
        check_resume(first, config)
    folder = run(config)
    report(folder)
    return folder


def evaluate(
    protocol: str,
    run: str | Path,
    data: str | Path | None = None,
    *,
    test_data: str | Path | None = None,
    data_root: Path | None = None,
    seed: int = 0,
    device: str = "auto",
    threads: int | None = None,
) -> dict[str, Any]:
    """Score the encoder of a run by a protocol (knn, linear) and write RUN/evaluation/PROTOCOL.json.

    data: by default what the run was trained on. test_data: by default the data's test split, or a held-out fifth.
    """
    from millionway.evaluation import protocols
    from millionway.train.console import track
    from millionway.train.setup import resume_config

    if data is None:
        stored = resume_config(Path(run))
        data, data_root = stored.data, data_root or stored.images.data_root
    return protocols.evaluate(
        protocol,
        Path(run),
        str(data),
        None if test_data is None else str(test_data),
        data_root=data_root,
        seed=seed,
        progress=track,
        **_compute(device, threads),
    )


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
    from millionway.evaluation.embed import embed as run_embed
    from millionway.train.console import track

    return run_embed(
        Path(run),
        str(data),
        Path(out),
        data_root=data_root,
        max_unreadable=max_unreadable,
        progress=track,
        **_compute(device, threads),
    )


def export(run: str | Path, out: str | Path, *, format: str = "safetensors") -> Path:
    """The encoder's weights under the names of torchvision or timm: safetensors, or torch for torch.load."""
    from millionway.exporting.weights import export as run_export

    return run_export(Path(run), Path(out), format)


def index(data: str | Path, out: str | Path, *, data_root: Path | None = None, threads: int | None = None) -> Manifest:
    """Number the images, check that each can be read, and write the list."""
    from millionway.data.manifest import build_manifest
    from millionway.data.sources import open_source
    from millionway.train.console import track
    from millionway.train.environment import num_cores

    out = Path(out)
    if not out.resolve().parent.is_dir() or out.is_dir():
        raise ValueError(f"--out {out}: give the name of a file in a folder that exists")
    manifest = build_manifest(open_source(str(data), data_root), threads or num_cores(), track)
    manifest.save(out)
    return manifest


def report(run: str | Path) -> Path:
    """Draw the run's page, RUN/report.html, from its files."""
    from millionway.reporting.page import write_report

    return write_report(Path(run))


def load_encoder(path: str | Path) -> Encoder:
    """The trained encoder as a torch module: colors from 0 to 1 in, features out. `path`: run folder or file."""
    from millionway.model.encoder_file import load_encoder as load

    return load(path)


def _compute(device: str, threads: int | None) -> dict[str, Any]:
    import torch

    from millionway.train.environment import choose_device, num_cores

    torch.set_num_threads(threads or num_cores())
    return {"device": choose_device(device), "num_threads": threads or num_cores()}

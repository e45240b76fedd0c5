"""Features of any images as a file for other programs."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch

from millionway.data.dataset import open_dataset
from millionway.evaluation.features import extract
from millionway.model.encoder_file import load_encoder


def check_out(out: Path) -> None:
    if out.suffix not in (".parquet", ".npy"):
        raise ValueError(f"--out {out}: the name must end in .parquet or .npy")
    if out.exists():
        raise ValueError(f"--out {out} exists already; choose another name")
    if not out.resolve().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.resolve().parent}")


def embed(
    run: Path,
    data: str,
    out: Path,
    *,
    data_root: Path | None = None,
    max_unreadable: float = 0.01,
    num_threads: int = 2,
    device: torch.device,
    progress: Callable[[Iterable, int, str], Iterable] | None = None,
) -> Path:
    """One row per readable image, in the order of the keys.

    .parquet: columns key, label (if there are any) and feature. .npy: [images, features] float32, keys in .keys.json.
    """
    check_out(out)
    encoder = load_encoder(run).to(device)
    dataset = open_dataset(data, data_root, num_threads=num_threads, max_unreadable=max_unreadable, progress=progress)
    ids = dataset.instance_ids
    features = extract(encoder, dataset, ids, encoder.spec.image_size, device, progress).numpy().astype(np.float32)
    keys = [dataset.manifest.keys[index] for index in ids.tolist()]
    if out.suffix == ".npy":
        np.save(out, features)
        out.with_suffix(".keys.json").write_text(json.dumps(keys), encoding="utf-8")
        return out
    columns: dict[str, pa.Array] = {"key": pa.array(keys)}
    if dataset.labels is not None:
        names = [*dataset.labels.names, None]  # -1 is the last one
        columns["label"] = pa.array([names[label] for label in dataset.labels.ids[ids.numpy()]], pa.string())
    columns["feature"] = pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), features.shape[1])
    pyarrow.parquet.write_table(pa.table(columns), out)
    return out

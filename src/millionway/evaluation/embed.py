"""Features of any images as a file for other programs."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from millionway.console import track
from millionway.data.dataset import open_dataset
from millionway.data.images import set_limits
from millionway.evaluation.features import extract
from millionway.files import check_new, replacing, write_whole
from millionway.machine import prepare
from millionway.model.encoder_file import load_encoder
from millionway.settings.embed import Embed


def embed(asked: Embed) -> Path:
    """One row per readable image, in the order of the keys.

    .parquet: columns key, label (if there are any) and feature. .npy: [images, features] float32, keys in .keys.json.
    """
    out = asked.out
    if out.suffix not in (".parquet", ".npy"):
        raise ValueError(f"--out {out}: the name must end in .parquet or .npy")
    check_new(out)
    if out.suffix == ".npy":
        check_new(out.with_suffix(".keys.json"))
    set_limits(asked.max_pixels, asked.max_image_bytes)
    device, num_threads = prepare(asked.device, asked.threads)
    encoder = load_encoder(asked.run).to(device)
    how = {"num_threads": num_threads, "max_unreadable": asked.max_unreadable, "progress": track}
    dataset = open_dataset(asked.data, asked.data_root, **how)
    size = encoder.spec.image_size
    features, ids = extract(encoder, dataset, dataset.instance_ids, size, device, track)
    features = features.numpy().astype(np.float32)
    keys = [dataset.manifest.keys[index] for index in ids.tolist()]
    if out.suffix == ".npy":
        with replacing(out) as aside, open(aside, "wb") as file:
            np.save(file, features)
        write_whole(out.with_suffix(".keys.json"), json.dumps(keys))
        return out
    columns: dict[str, pa.Array] = {"key": pa.array(keys)}
    if dataset.labels is not None:
        names = [*dataset.labels.names, None]  # -1 is the last one
        columns["label"] = pa.array([names[label] for label in dataset.labels.ids[ids.numpy()]], pa.string())
    columns["feature"] = pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), features.shape[1])
    with replacing(out) as aside:
        pyarrow.parquet.write_table(pa.table(columns), aside)
    return out

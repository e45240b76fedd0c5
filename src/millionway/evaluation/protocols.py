"""Score the encoder of a run: features once, then one protocol; the numbers go into the run folder.

A protocol is a function of (bank, bank labels, queries, query labels, seed) that yields (name, value), in a file of its
own. Few labels, fine-tuning, detection and retrieval have their place here, beside knn.py and linear.py.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millionway.data.dataset import open_dataset, open_test
from millionway.evaluation import knn as knn_protocol
from millionway.evaluation import linear as linear_protocol
from millionway.evaluation.features import extract_labelled, labelled_split
from millionway.evaluation.results import write_result
from millionway.model.encoder_file import encoder_path, load_encoder
from millionway.names import suggest


def _knn(bank: Tensor, bank_labels: Tensor, queries: Tensor, query_labels: Tensor, seed: int) -> Iterator:
    return knn_protocol.knn(bank, bank_labels, queries, query_labels)


PROTOCOLS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, int], Iterator[tuple[str, float]]]] = {
    "knn": _knn,
    "linear": linear_protocol.linear,
}


def evaluate(
    protocol: str,
    run: Path,
    data: str,
    test_data: str | None = None,
    *,
    data_root: Path | None = None,
    manifest: Path | None = None,
    max_images: int | None = None,
    max_unreadable: float = 0.01,
    seed: int = 0,
    num_threads: int = 2,
    device: torch.device,
    progress: Callable[[Iterable, int, str], Iterable] | None = None,
) -> dict[str, Any]:
    """The numbers of a protocol. Queries: test_data, the data's own test split, or a held-out fifth of each class."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"evaluate {protocol}: no such protocol. {suggest(protocol, PROTOCOLS)}")
    started = time.monotonic()
    encoder = load_encoder(run).to(device)
    options: dict[str, Any] = {"num_threads": num_threads, "max_unreadable": max_unreadable, "progress": progress}
    train = open_dataset(data, data_root, manifest, max_images=max_images, **options)
    test = open_test(data, test_data, data_root, **options)
    split = labelled_split(train, test, seed)
    if split is None:
        raise ValueError(
            f"evaluate {protocol}: {data} has no labels. They are the names of the folders directly below it "
            "(at least two), a `label` column of a .csv list, or those of a named set."
        )

    size = encoder.spec.image_size
    bank, bank_labels = extract_labelled(encoder, split.bank, size, device, progress)
    queries, query_labels = extract_labelled(encoder, split.queries, size, device, progress)
    numbers = dict(PROTOCOLS[protocol](bank, bank_labels, queries, query_labels, seed))
    settings = {
        "data": data,
        "test_data": test_data,
        "num_bank": len(bank),
        "num_queries": len(queries),
        "num_labels": len(split.label_names),
        "chance": split.chance,
        "image_size": encoder.spec.image_size,
        "encoder_hash": file_hash(encoder_path(run)),
        "data_fingerprint": train.manifest.fingerprint,
        **_settings_of(protocol, len(bank)),
    }
    if run.is_dir():
        write_result(run, protocol, numbers, settings, seed, time.monotonic() - started)
    return {**numbers, "chance": split.chance}


def _settings_of(protocol: str, num_bank: int) -> dict[str, Any]:
    if protocol == "knn":
        k = [min(k, num_bank) for k in knn_protocol.NEIGHBORS]
        return {"k": k, "temperature": knn_protocol.TEMPERATURE}
    batch_size = linear_protocol.batch_size_for(num_bank)
    lr = linear_protocol.LR * batch_size / linear_protocol.BATCH_SIZE
    return {
        "epochs": linear_protocol.EPOCHS,
        "batch_size": batch_size,
        "lr": lr,
        "momentum": linear_protocol.MOMENTUM,
    }


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]

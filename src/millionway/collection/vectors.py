"""One vector for each image: the encoder's features, the rows of a run's classifier, or those that somebody has."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor

from millionway.data.dataset import Dataset
from millionway.data.manifest import Manifest
from millionway.data.readers import Progress
from millionway.data.source import Keys
from millionway.evaluation.feature_cache import FeatureCache
from millionway.evaluation.features import extract
from millionway.evaluation.subject import Subject
from millionway.train.checkpoint import newest_rows

VECTOR_COLUMNS = ("vector", "feature", "embedding")
IMAGES_AT_ONCE = 16_384  # features are kept after so many, for whoever interrupts


@dataclass(frozen=True)
class Vectors:
    ids: np.ndarray  # [images] instance ids, ascending
    unit: Tensor  # [images, dim] of length one
    what: str
    """in words"""

    @cached_property
    def identity(self) -> str:
        """Changes with any number."""
        digest = hashlib.blake2b(self.ids.tobytes(), digest_size=16)
        digest.update(self.unit.cpu().contiguous().numpy().data)
        return digest.hexdigest()


def of_features(
    subject: Subject,
    dataset: Dataset,
    device: torch.device,
    cache: FeatureCache | None = None,
    progress: Progress | None = None,
) -> Vectors:
    """One pass of the encoder over all images that can be read."""
    encoder, size = subject.encoder.to(device), subject.encoder.spec.image_size

    def compute(ids: Tensor) -> tuple[Tensor, Tensor]:
        return extract(encoder, dataset, ids, size, device, progress)

    features, ids = [], []
    for some in dataset.instance_ids.split(IMAGES_AT_ONCE):
        found = (
            compute(some)
            if cache is None
            else cache.get(subject.encoder_hash, dataset.manifest.fingerprint, size, some, compute)
        )
        features.append(found[0])
        ids.append(found[1])
    return _vectors(torch.cat(ids).numpy(), torch.cat(features), f"features of {subject.name}")


def of_rows(run: Path, manifest: Manifest, fingerprint: str) -> Vectors:
    """The rows of the newest checkpoint that is whole: row i belongs to image i. fingerprint: of the run's own list."""
    found = newest_rows(run / "checkpoints", fingerprint)
    if found is None:
        raise ValueError(f"{run} has no rows: no checkpoint is whole. Use its features: --vectors features")
    rows, folder = found
    ids = np.flatnonzero(manifest.readable)
    return _vectors(ids, rows[torch.from_numpy(ids)].float(), f"rows of {folder}")


def of_table(path: Path, manifest: Manifest, own_order: bool) -> Vectors:
    """Of a Parquet file with a column of vectors; own_order: its lines are the images, else a column names them."""
    if not path.is_file():
        raise ValueError(f"--features {path}: no such file")
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"--features {path}: not a readable Parquet file ({error})") from None
    column = next((name for name in VECTOR_COLUMNS if name in table.column_names), None)
    if column is None:
        raise ValueError(
            f"--features {path}: no column of vectors ({', '.join(VECTOR_COLUMNS)}); there are "
            f"{', '.join(table.column_names)}"
        )
    vectors = _matrix(path, table[column])
    if own_order:
        ids = np.flatnonzero(manifest.readable)
        return _vectors(ids, vectors[torch.from_numpy(ids)], str(path))
    names = next((name for name in ("key", "path") if name in table.column_names), None)
    if names is None:
        raise ValueError(f"--features {path}: with --data it needs a column `key` or `path` that names the images")
    places = manifest.keys.places_of(Keys(table[names].cast(pa.string())))
    if not (places >= 0).any():
        raise ValueError(f"--features {path}: none of its images is in the data, for example {table[names][0]}")
    known = np.flatnonzero((places >= 0) & manifest.readable[places])
    known = known[np.argsort(places[known], kind="stable")]
    return _vectors(places[known], vectors[torch.from_numpy(known)], str(path))


def _matrix(path: Path, column: pa.ChunkedArray) -> Tensor:
    lists = column.combine_chunks()
    lengths = np.unique(lists.value_lengths().to_numpy(zero_copy_only=False)) if len(lists) else np.zeros(0)
    if lists.null_count or len(lengths) != 1 or not lengths[0] > 0:
        raise ValueError(f"--features {path}: the vectors are not all there, or not all of one length")
    return torch.from_numpy(lists.flatten().to_numpy(zero_copy_only=False).astype(np.float32)).view(len(lists), -1)


def _vectors(ids: np.ndarray, vectors: Tensor, what: str) -> Vectors:
    if len(ids) == 0:
        raise ValueError(f"{what}: there is no image")
    broken = (~torch.isfinite(vectors).all(dim=1)).nonzero()[:, 0]
    if len(broken):
        raise ValueError(
            f"{what}: {len(broken):,} of {len(ids):,} vectors have numbers that are not finite (NaN or infinity), "
            f"the first one that of image {ids[int(broken[0])]}"
        )
    return Vectors(ids.astype(np.int64), F.normalize(vectors.float(), dim=1), what)

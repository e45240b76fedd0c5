"""A collection: images, one vector for each, and what follows from both. Everything is made when it is asked for."""

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from millionway.collection import answers
from millionway.collection import clusters as grouping
from millionway.collection import duplicates as twice
from millionway.collection import places as mapping
from millionway.collection import table as tables
from millionway.collection import vectors as making
from millionway.collection.answers import Answer
from millionway.collection.kept import Kept
from millionway.collection.looks import Looks, look
from millionway.collection.neighbors import NUM_NEIGHBORS, Neighbors, nearest
from millionway.collection.outliers import Outliers, outliers
from millionway.collection.sources import paths_of
from millionway.collection.vectors import Vectors
from millionway.data.dataset import Dataset
from millionway.data.manifest import hash_of
from millionway.data.readers import Progress
from millionway.evaluation.feature_cache import FeatureCache
from millionway.evaluation.subject import Subject
from millionway.settings.collection import Keep, VectorKind

log = logging.getLogger("millionway")

CENTRAL = 8  # images that stand for a cluster


@dataclass
class Collection:
    """Images in the order of `ids`; every array and tensor here has that order."""

    dataset: Dataset
    kind: VectorKind
    device: torch.device
    num_threads: int
    subject: Subject | None = None
    run: Path | None = None
    features: Path | None = None
    own_order: bool = False
    """the lines of `features` are the images"""
    list_fingerprint: str = ""
    """of the run's list, as it was trained on"""
    cache: FeatureCache | None = None
    progress: Progress | None = None

    @cached_property
    def vectors(self) -> Vectors:
        if self.features is not None:
            return making.of_table(self.features, self.dataset.manifest, self.own_order)
        if self.kind == "rows":
            assert self.run is not None
            return making.of_rows(self.run, self.dataset.manifest, self.list_fingerprint)
        assert self.subject is not None
        return making.of_features(self.subject, self.dataset, self.device, self.cache, self.progress)

    @property
    def ids(self) -> np.ndarray:
        return self.vectors.ids

    @cached_property
    def place_of(self) -> dict[int, int]:
        return {instance_id: place for place, instance_id in enumerate(self.ids.tolist())}

    @cached_property
    def paths(self) -> list[str]:
        return paths_of(self.dataset.source, self.ids)

    @cached_property
    def place_of_path(self) -> dict[str, int]:
        return {path: place for place, path in enumerate(self.paths)}

    @cached_property
    def labels(self) -> np.ndarray:
        """[images] text, None where unknown."""
        labels = self.dataset.labels
        if labels is None:
            return np.full(len(self.ids), None, dtype=object)
        return np.array([*labels.names, None], dtype=object)[labels.ids[self.ids]]

    @cached_property
    def kept(self) -> Kept:
        return Kept.of(self.dataset.manifest.fingerprint)

    @cached_property
    def looks(self) -> Looks:
        folder = self.kept.folder / f"looks-{hash_of(self.ids.tobytes())}"
        return look(self.dataset.source, self.ids, folder, self.num_threads, self.progress)

    def thumbnail_of(self, instance_id: int) -> bytes | None:
        place = self.place_of.get(instance_id)
        return None if place is None else self.looks.thumbnail(place)

    @cached_property
    def near(self) -> Neighbors:
        def compute() -> dict[str, Tensor]:
            near = nearest(self.vectors.unit.to(self.device), NUM_NEIGHBORS, self.progress)
            return {"places": near.places.cpu(), "cosines": near.cosines.cpu()}

        kept = self.kept.tensors(f"neighbors-{NUM_NEIGHBORS}-{self.vectors.identity}", compute)
        return Neighbors(kept["places"], kept["cosines"])

    @cached_property
    def places(self) -> np.ndarray:
        """[images, 2] on the map."""

        def compute() -> dict[str, Tensor]:
            log.info("placing %d images on the map", len(self.ids))
            return {"places": torch.from_numpy(mapping.places(self.vectors.unit, self.near, self.num_threads))}

        name = f"places-{mapping.method().replace(' ', '-')}-{self.vectors.identity}"
        return self.kept.tensors(name, compute)["places"].numpy()

    @cached_property
    def clusters(self) -> np.ndarray:
        """[images] -1 for those in none."""
        return grouping.clusters(self.places)

    @cached_property
    def central(self) -> list[list[int]]:
        """Of each cluster, the places of a few images that stand for it."""
        return grouping.central(self.clusters, self.vectors.unit.numpy(), CENTRAL)

    @cached_property
    def agreement(self) -> float | None:
        """Of clusters and labels; None without labels."""
        labels = self.dataset.labels
        return None if labels is None else grouping.agreement(self.clusters, labels.ids[self.ids])

    @cached_property
    def strange(self) -> Outliers:
        manifest, pixels = self.dataset.manifest, {name: self.looks.column(name) for name in Looks.NUMBERS}
        width, height = (manifest.column(name)[self.ids] for name in ("width", "height"))
        return outliers(self.vectors.unit, self.near, pixels, width, height)

    @cached_property
    def hashes(self) -> np.ndarray:
        return self.dataset.manifest.column("content_hash")[self.ids].astype(str)

    def pairs(self, threshold: float | None = None) -> tuple[twice.Pairs, float]:
        """(pairs of copies and near copies, the threshold that was used)"""
        twice.check_threshold(threshold)
        if threshold is None:
            threshold = twice.default_threshold(self.near)
            log.info("candidates are pairs with a cosine of at least %.3f, from the data's own nearest ones", threshold)
        found = twice.find_pairs(self.near, self.looks, self.hashes, threshold, self.progress)
        return found.where(found.likeness >= self.least_likeness), threshold

    @cached_property
    def least_likeness(self) -> float:
        """Of the pixels of two copies."""
        return twice.least_likeness(self.near, self.looks)

    @cached_property
    def groups(self) -> np.ndarray:
        """[images] by the default threshold; -1 for an image that is there once."""
        return twice.groups(self.pairs()[0].places, self.hashes)

    # --- what a person asks -------------------------------------------------------------------------------------------

    def search(self, *queries: str | int | Path, k: int = NUM_NEIGHBORS) -> Answer:
        """The k images that are most like each query: a file, or an image of the collection by its id or path."""
        return answers.search(self, queries, k)

    def duplicates(
        self, threshold: float | None = None, keep: Keep = "largest", against: "Collection | None" = None
    ) -> Answer:
        """Groups of the same or nearly the same picture; or what is here and in another collection too."""
        return answers.duplicates(self, threshold, keep) if against is None else answers.leaks(self, against, threshold)

    def outliers(self, num: int = 100) -> Answer:
        """The images that belong least, with the reasons."""
        return answers.outliers(self, num)

    def map(self, out: str | Path | None = None) -> Path:
        """Write all that is known as one Parquet file, RUN/collection.parquet if `out` is not given."""
        return self.write(self.file(None if out is None else Path(out)))

    def file(self, out: Path | None = None) -> Path:
        """Where the table is, or will be."""
        if out is None and self.run is None:
            raise ValueError("--out is missing: the .parquet file to write")
        out = out or self.run / tables.NAME  # pyright: ignore[reportOptionalOperand]
        if out.suffix != ".parquet":
            raise ValueError(f"--out {out}: the name must end in .parquet")
        return out

    def _repr_html_(self) -> str:
        return answers.overview(self)

    # --- collection.parquet -------------------------------------------------------------------------------------------

    @property
    def made_of(self) -> dict[str, Any]:
        """What decides every number of the table."""
        vectors = {"features": None if self.subject is None else self.subject.encoder_hash, "rows": "", "given": ""}
        kind = "given" if self.features is not None else self.kind
        identity = vectors[kind] if kind == "features" else self.vectors.identity
        return {
            "version": 1,
            "images": self.dataset.manifest.fingerprint,
            "vectors": kind,
            "identity": identity,
            "method": mapping.method(),
        }

    def table(self) -> pa.Table:
        """All that is known, in the columns of collection.parquet."""
        ids, manifest = self.ids, self.dataset.manifest
        paths = pa.chunked_array([pa.array(self.paths, pa.string())])
        modified = manifest.column("modified")[ids]
        columns = {
            "id": ids,
            "path": paths,
            "label": pa.array(self.labels.tolist(), pa.string()),
            "x": self.places[:, 0],
            "y": self.places[:, 1],
            "cluster": tables.or_null(self.clusters, pa.int32(), self.clusters >= 0),
            "neighbors": tables.neighbors_column(self.near),
            "outlier_score": self.strange.score,
            "outlier_reason": pa.array(self.strange.reason, pa.string()),
            "duplicate_group": tables.or_null(self.groups, pa.int32(), self.groups >= 0),
            "keep": twice.kept_of(self.groups, manifest, ids, "largest"),
            "width": manifest.column("width")[ids],
            "height": manifest.column("height")[ids],
            "modified": tables.or_null(modified // 1000, pa.timestamp("us", "UTC"), modified > 0),
            "thumbnail": tables.thumbnail_column(self.looks, paths),
        }
        return pa.table(columns, schema=tables.SCHEMA)

    def write(self, path: Path) -> Path:
        tables.write_table(path, self.table(), self.about())
        return path

    def about(self) -> dict[str, Any]:
        """What the table does not say of single images."""
        central = [self.ids[places].tolist() for places in self.central]
        words = {"what": self.vectors.what, "agreement": self.agreement, "central": central}
        return {"made_of": self.made_of, **words}

    def read(self, path: Path) -> tuple[pa.Table, dict[str, Any]] | None:
        """(the table, what stands about it), if the file is of these images and vectors."""
        about = tables.read_about(path)
        if about is None or about.get("made_of") != self.made_of:
            return None
        return pq.read_table(path, memory_map=True), about

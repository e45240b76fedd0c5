"""What the command line and Python ask of a collection: open it, answer, write what was asked for."""

import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

from millionway.collection.answers import Answer
from millionway.collection.collection import Collection
from millionway.collection.opening import open_collection, open_others
from millionway.collection.sources import are_files, write_list
from millionway.console import track
from millionway.files import check_new, replacing, write_whole
from millionway.settings.collection import Duplicates, Map, Outliers, Search

log = logging.getLogger("millionway")


def search(asked: Search) -> pa.Table:
    _check_out(asked.out)
    queries = (asked.query,) if isinstance(asked.query, str | int | Path) else asked.query
    found = open_collection(asked, track).search(*map_ids(queries), k=asked.top)
    return _written(found, asked.out)


def map_ids(queries: tuple) -> list:
    """A number that is no file is an id."""
    return [int(each) if str(each).isdecimal() and not Path(str(each)).exists() else each for each in queries]


def duplicates(asked: Duplicates) -> pa.Table:
    _check_out(asked.out)
    if asked.write_list is not None:
        check_new(asked.write_list, "--write-list")
        if asked.against is not None:
            raise ValueError("--write-list is for the groups of one collection; leave out --against")
    collection = open_collection(asked, track)
    if asked.write_list is not None and not are_files(collection.dataset.source):
        raise ValueError(f"--write-list {asked.write_list}: a list is for images that are files of their own")
    against = None if asked.against is None else open_others(collection, asked, asked.against)
    found = collection.duplicates(asked.threshold, asked.keep, against)
    log.info("%s", found.title)
    if asked.write_list is not None:
        kept = _kept_paths(collection, found)
        write_list(asked.write_list, kept)
        log.info("%s: %d of %d images", asked.write_list, len(kept), len(collection.ids))
    return _written(found, asked.out)


def _kept_paths(collection: Collection, found: Answer) -> list[str]:
    """All but what is in a group and not the one to keep."""
    lines = zip(found.table["id"].to_pylist(), found.table["keep"].to_pylist())
    spare = {instance_id for instance_id, keep in lines if not keep}
    return [path for path, instance_id in zip(collection.paths, collection.ids.tolist()) if instance_id not in spare]


def outliers(asked: Outliers) -> pa.Table:
    _check_out(asked.out)
    return _written(open_collection(asked, track).outliers(asked.top), asked.out)


def map(asked: Map) -> Path:
    collection = open_collection(asked, track)
    path = collection.file(asked.out)  # refused before any long work
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.absolute().parent}")
    collection.map(path)
    clusters, alike = collection.clusters, collection.agreement
    log.info("%d clusters, %d images in none", clusters.max(initial=-1) + 1, np.count_nonzero(clusters < 0))
    if alike is not None:
        log.info("agreement of clusters and labels (adjusted mutual information): %.2f", alike)
    return path


def _check_out(out: Path | None) -> None:
    if out is not None:
        check_new(out)
        if out.suffix not in (".csv", ".parquet", ".html"):
            raise ValueError(f"--out {out}: the name must end in .csv, .parquet or .html")


def _written(found: Answer, out: Path | None) -> pa.Table:
    if out is not None and out.suffix == ".html":
        write_whole(out, found.page())
    elif out is not None:
        with replacing(out) as aside:
            write = csv.write_csv if out.suffix == ".csv" else pq.write_table
            write(found.table, aside)
    return found.table

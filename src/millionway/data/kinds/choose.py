"""Where images come from: a folder, a list, shards, a table, an array, a named set. All look alike."""

import os
from pathlib import Path

from millionway.data.kinds import tables
from millionway.data.kinds.arrays import open_array
from millionway.data.kinds.folders import open_folder, open_list
from millionway.data.kinds.named_sets import NAMED
from millionway.data.kinds.remote import is_remote, open_remote
from millionway.data.kinds.tar_shards import expand, open_shards
from millionway.data.source import Source, some_of
from millionway.settings.checks import suggest


def open_source(data: str, data_root: Path | None = None, test: bool = False, max_images: int | None = None) -> Source:
    """The images named by `data`: a known set, a folder, a list, tar shards, Parquet or Arrow, an array, an address.

    test: the test split, where the data has one of its own (see `has_test_split`). max_images: at most so many of them.
    """
    source = _open(data, data_root, test)
    return source if max_images is None else some_of(source, max_images)


def _open(data: str, data_root: Path | None, test: bool) -> Source:
    if is_named(data):
        return NAMED[data](data_root or default_data_root(), test)
    if is_remote(data):
        return open_remote(data)
    path = Path(data).expanduser()
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".tar":
        return open_shards(data, expand(str(path)))
    if path.suffix in tables.EXTENSIONS and path.is_file():
        return tables.open_table(data, [path])
    if path.suffix in (".npy", ".npz") and path.is_file():
        return open_array(path)
    if path.is_file():
        return open_list(path)
    raise ValueError(f"--data {data}: no such folder or file, and no known set. {suggest(data, NAMED)}")


def _open_folder(path: Path) -> Source:
    """A folder of nothing but shards, or of nothing but tables, is those; else its images."""
    names, ends = [], set()
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    names.append(entry.name)
                    ends.add(os.path.splitext(entry.name)[1])
                if ends and ends not in ({".tar"}, {".parquet"}):
                    break  # a folder of millions of images is not listed twice
    except OSError as error:
        raise ValueError(f"--data {path} cannot be read: {error.strerror}") from None
    names.sort()
    if ends == {".tar"}:
        return open_shards(str(path), [str(path / name) for name in names])
    if ends == {".parquet"}:
        return tables.open_table(str(path), [path / name for name in names])
    return open_folder(path)


def is_named(data: str) -> bool:
    """Whether it is the name of a known set; a folder of that name is ./NAME."""
    return data in NAMED


def has_test_split(data: str) -> bool:
    """Whether `open_source(data, test=True)` gives other images."""
    return is_named(data) and data not in ("digits", "sun397", "inaturalist2018")


def default_data_root() -> Path:
    return Path(os.environ.get("MILLIONWAY_DATA", "~/.cache/millionway/data")).expanduser()

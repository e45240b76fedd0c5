"""Where images come from: a folder, a file list, a named set. All look alike."""

import csv
import gzip
import io
import logging
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from millionway import randomness
from millionway.data.images import EXTENSIONS, UnreadableImage
from millionway.names import suggest

log = logging.getLogger("millionway")

SPLIT_FOLDERS = {"train": 0, "training": 0, "test": 1, "testing": 1, "val": 1, "valid": 1, "validation": 1}
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True)
class Labels:
    """What people called the images. Never used for training; k-NN, linear and the like are scored with it."""

    ids: np.ndarray
    """[images] index into names, -1 where unknown"""
    names: list[str]
    is_test: np.ndarray | None = None
    """[images] True for the images of a test split, if the source has one"""


class Source(Protocol):
    """Numbered images with a stable key each."""

    @property
    def name(self) -> str: ...

    @property
    def keys(self) -> Sequence[str]: ...

    @property
    def labels(self) -> Labels | None: ...

    def __len__(self) -> int: ...

    def num_bytes(self, index: int) -> int:
        """Size as stored; cheap, so that a changed image can be noticed. -1 if it is gone."""
        ...

    def read(self, index: int) -> bytes | np.ndarray:
        """The encoded file, or the pixels of an image that lives in memory. Raises UnreadableImage."""
        ...


@dataclass
class FileSource:
    """Images that are files."""

    name: str
    paths: list[str]
    keys: list[str]
    labels: Labels | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def num_bytes(self, index: int) -> int:
        try:
            return os.stat(self.paths[index]).st_size
        except OSError:
            return -1

    def read(self, index: int) -> bytes:
        try:
            # Without O_NONBLOCK, opening a named pipe would wait for somebody to write into it.
            with open(os.open(self.paths[index], os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise UnreadableImage("not a regular file")
                return file.read()
        except OSError as error:
            raise UnreadableImage(error.strerror or str(error)) from None


@dataclass
class ArraySource:
    """Images that live in memory: [images, height, width] or [images, height, width, 3], uint8."""

    name: str
    pixels: np.ndarray
    labels: Labels | None = None
    keys: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = [f"{self.name}/{index:06d}" for index in range(len(self.pixels))]

    def __len__(self) -> int:
        return len(self.pixels)

    def num_bytes(self, index: int) -> int:
        return self.pixels[index].nbytes

    def read(self, index: int) -> np.ndarray:
        return np.ascontiguousarray(self.pixels[index])


@dataclass
class Part:
    """Some images of a source, or all in another order."""

    source: Source
    places: Sequence[int]
    """in the source; -1 for an image that is gone"""
    keys: Sequence[str]
    labels: Labels | None = None

    @property
    def name(self) -> str:
        return self.source.name

    def __len__(self) -> int:
        return len(self.places)

    def num_bytes(self, index: int) -> int:
        place = self.places[index]
        return -1 if place < 0 else self.source.num_bytes(place)

    def read(self, index: int) -> bytes | np.ndarray:
        if self.places[index] < 0:
            raise UnreadableImage("the image is gone")
        return self.source.read(self.places[index])


def some_of(source: Source, num: int) -> Source:
    """So many images of the source, the same ones each time, in its order."""
    if num >= len(source):
        return source
    order = torch.randperm(len(source), generator=randomness.generator(0, "some images"))
    places = order[:num].sort().values.numpy()
    labels = source.labels
    if labels is not None:
        labels = Labels(labels.ids[places], labels.names, None if labels.is_test is None else labels.is_test[places])
    return Part(source, places.tolist(), [source.keys[int(place)] for place in places], labels)


def open_source(data: str, data_root: Path | None = None, test: bool = False, max_images: int | None = None) -> Source:
    """The images named by `data`: the name of a known set, a folder, or a .txt or .csv file list.

    test: the test split, where the data has one of its own (see `has_test_split`). max_images: at most so many of them.
    """
    source = _open(data, data_root, test)
    return source if max_images is None else some_of(source, max_images)


def _open(data: str, data_root: Path | None, test: bool) -> Source:
    if is_named(data):
        return NAMED[data](data_root or default_data_root(), test)
    path = Path(data).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        return _file_list(path)
    raise ValueError(f"--data {data}: no such folder or file, and no known set. {suggest(data, NAMED)}")


def is_named(data: str) -> bool:
    """Whether it is the name of a known set; a folder of that name is ./NAME."""
    return data in NAMED


def has_test_split(data: str) -> bool:
    """Whether `open_source(data, test=True)` gives other images."""
    return is_named(data) and data not in ("digits", "sun397", "inaturalist2018")


def default_data_root() -> Path:
    return Path(os.environ.get("MILLIONWAY_DATA", "~/.cache/millionway/data")).expanduser()


# --- folders and lists ------------------------------------------------------------------------------------------------


def _folder(root: Path) -> FileSource:
    """Every image below root, at any depth, in the order of its relative path."""
    found, num_other = [], 0
    try:
        os.scandir(root).close()
    except OSError as error:
        raise ValueError(f"--data {root} cannot be read: {error.strerror}") from None
    for path in _walk(root):
        if os.path.splitext(path)[1].lower() in EXTENSIONS:
            found.append(path)
        else:
            num_other += 1
    if not found:
        others = f"{num_other} other files are there" if num_other else "the folder is empty"
        raise ValueError(
            f"--data {root}: no image found; {others}. Looked in all subfolders for {' '.join(sorted(EXTENSIONS))}"
        )
    relative = sorted((os.path.relpath(path, root), path) for path in found)
    keys = [_key(name) for name, _ in relative]
    return FileSource(str(root), [path for _, path in relative], keys, _labels_of_folders(keys))


def _walk(root: Path) -> Iterator[str]:
    """Files below root, symbolic links followed, each folder once (so loops end); hidden names are passed over."""
    seen = set()

    def warn(error: OSError) -> None:
        log.warning("passed over: %s: %s", error.filename, error.strerror)

    for folder, subfolders, files in os.walk(root, followlinks=True, onerror=warn):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            subfolders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith((".", "__MACOSX")))
        yield from (os.path.join(folder, name) for name in files if not name.startswith("."))


def _key(relative_path: str) -> str:
    """The path as text that any file format can hold; bytes that are not UTF-8 are spelled out."""
    return os.fsencode(relative_path).decode("utf-8", "backslashreplace").replace(os.sep, "/")


def _labels_of_folders(keys: Sequence[str]) -> Labels | None:
    """The name of the first folder is the label; below train/ and test/ (or val/) it is the second one."""
    parts = [key.split("/")[:-1] for key in keys]
    is_test = None
    if all(part and part[0].lower() in SPLIT_FOLDERS for part in parts):
        is_test = np.array([SPLIT_FOLDERS[part[0].lower()] == 1 for part in parts])
        parts = [part[1:] for part in parts]
        if not is_test.any() or is_test.all():
            is_test = None
    return _labels([part[0] if part else "" for part in parts], is_test)


def _labels(texts: list[str], is_test: np.ndarray | None = None) -> Labels | None:
    """Labels from one word per image, '' where unknown; None unless there are two different ones."""
    names = sorted(set(texts) - {""})
    if len(names) < 2:
        return None
    number = {name: index for index, name in enumerate(names)} | {"": -1}
    return Labels(np.array([number[text] for text in texts], dtype=np.int64), names, is_test)


def _file_list(path: Path) -> FileSource:
    """A .txt with a path a line, or a .csv with a column `path` and perhaps `label`; relative to the list's folder."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(
            f"--data {path}: not a text file. Give a folder, a .txt or .csv list, or a named set."
        ) from None
    if path.suffix.lower() == ".csv":
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
        if not rows or "path" not in rows[0]:
            raise ValueError(f"--data {path}: a .csv list needs a header with a column `path` (and perhaps `label`)")
        for number, row in enumerate(rows, start=2):
            if not row["path"]:
                raise ValueError(f"--data {path}: line {number} has no path")
        names, texts = [row["path"] for row in rows], [row.get("label") or "" for row in rows]
    elif path.suffix.lower() in (".txt", ".lst", ".list", ""):
        names = [line for line in text.split("\n") if line.strip()]
        texts = [""] * len(names)
    else:
        raise ValueError(f"--data {path}: give a folder, a .txt or .csv list of paths, or a named set")
    if not names:
        raise ValueError(f"--data {path}: the list names no image")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"--data {path}: {len(twice)} images are listed twice, for example {twice[0]!r}")
    return FileSource(str(path), [str(path.parent / name) for name in names], [_key(n) for n in names], _labels(texts))


# --- named sets -------------------------------------------------------------------------------------------------------


def _digits(root: Path, test: bool) -> ArraySource:
    """scikit-learn's bundled handwritten digits: 1,797 images of 8 x 8 pixels with values 0 to 16."""
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    pixels = (bunch.images * (255 / 16)).round().astype(np.uint8)
    labels = Labels(bunch.target.astype(np.int64), [str(digit) for digit in range(10)])
    return ArraySource("digits", pixels, labels)


def _fashion_mnist(root: Path, test: bool) -> ArraySource:
    if not DEBIAN_FASHION_MNIST.is_dir():
        return _torchvision("fashion-mnist", "FashionMNIST")(root, test)
    prefix = "t10k" if test else "train"
    images = _read_idx(DEBIAN_FASHION_MNIST / f"{prefix}-images-idx3-ubyte.gz")
    labels = _read_idx(DEBIAN_FASHION_MNIST / f"{prefix}-labels-idx1-ubyte.gz").astype(np.int64)
    names = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
    return ArraySource("fashion-mnist", images, Labels(labels, names))


def _read_idx(path: Path) -> np.ndarray:
    """The idx format of MNIST: two zero bytes, type 8 (uint8), number of axes, the sizes, then the values."""
    data = gzip.decompress(path.read_bytes())
    if data[:3] != b"\0\0\x08":
        raise ValueError(f"{path}: not an idx file of bytes")
    num_axes = data[3]
    shape = np.frombuffer(data, ">u4", num_axes, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * num_axes).reshape(shape)


def _torchvision(name: str, class_name: str) -> Callable[[Path, bool], ArraySource]:
    """A set of torchvision's that lives in memory; downloaded into data_root the first time."""

    def load(root: Path, test: bool) -> ArraySource:
        import torchvision.datasets

        train = "train+unlabeled" if class_name == "STL10" else "train"
        by_name = class_name in ("SVHN", "STL10")
        split = {"split": "test" if test else train} if by_name else {"train": not test}
        try:
            dataset = getattr(torchvision.datasets, class_name)(str(root), download=True, **split)
        except Exception as error:  # whatever the download or the archive raises, the remedy is the same
            raise ValueError(
                f"--data {name}: torchvision could neither find it in {root} nor download it ({error}). "
                "Put its files there, or give their folder with --data-root."
            ) from None
        pixels = np.asarray(dataset.data)
        if pixels.ndim == 4 and pixels.shape[1] == 3:
            pixels = pixels.transpose(0, 2, 3, 1)  # SVHN and STL10 come channels first
        labels = np.asarray(getattr(dataset, "targets", getattr(dataset, "labels", None))).astype(np.int64)
        names = list(getattr(dataset, "classes", [str(index) for index in range(int(labels.max()) + 1)]))
        return ArraySource(name, pixels, Labels(labels, names))

    return load


def _torchvision_files(
    name: str, class_name: str, split: Callable[[bool], dict[str, str]]
) -> Callable[[Path, bool], FileSource]:
    """A set of torchvision's that is files; downloaded into data_root the first time."""

    def load(root: Path, test: bool) -> FileSource:
        import torchvision.datasets

        kind: Any = getattr(torchvision.datasets, class_name)
        try:
            try:
                dataset = kind(str(root), **split(test))
            except RuntimeError:  # not there
                dataset = kind(str(root), download=True, **split(test))
        except Exception as error:  # whatever the download or the archive raises, the remedy is the same
            raise ValueError(
                f"--data {name}: torchvision could neither find it in {root} nor download it ({error}). "
                "Put its files there, or give their folder with --data-root."
            ) from None
        if hasattr(dataset, "index"):  # iNaturalist
            categories = dataset.all_categories
            entries = [(Path(dataset.root) / categories[label] / file, label) for label, file in dataset.index]
        else:
            categories, entries = dataset.classes, list(zip(dataset._image_files, dataset._labels))
        entries = sorted((str(path), label) for path, label in entries)
        keys = [_key(os.path.relpath(path, root)) for path, _ in entries]
        labels = Labels(np.array([label for _, label in entries], dtype=np.int64), list(categories))
        return FileSource(name, [path for path, _ in entries], keys, labels)

    return load


NAMED: dict[str, Callable[[Path, bool], Source]] = {
    "digits": _digits,
    "fashion-mnist": _fashion_mnist,
    "mnist": _torchvision("mnist", "MNIST"),
    "kmnist": _torchvision("kmnist", "KMNIST"),
    "cifar10": _torchvision("cifar10", "CIFAR10"),
    "cifar100": _torchvision("cifar100", "CIFAR100"),
    "svhn": _torchvision("svhn", "SVHN"),
    "stl10": _torchvision("stl10", "STL10"),
    "dtd": _torchvision_files("dtd", "DTD", lambda test: {"split": "test" if test else "train"}),
    "sun397": _torchvision_files("sun397", "SUN397", lambda test: {}),
    "inaturalist2018": _torchvision_files("inaturalist2018", "INaturalist", lambda test: {"version": "2018"}),
}

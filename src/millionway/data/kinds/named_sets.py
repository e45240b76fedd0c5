"""Sets that have a name: scikit-learn's digits, Debian's Fashion-MNIST, torchvision's."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from millionway.data.kinds.folders import FileSource, list_of_files
from millionway.data.source import ArraySource, Labels, Source

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


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


def _not_there(name: str, root: Path, error: Exception) -> ValueError:
    return ValueError(
        f"--data {name}: torchvision could neither find it in {root} nor download it ({error}). "
        "Put its files there, or give their folder with --data-root."
    )


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
            raise _not_there(name, root, error) from None
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
            raise _not_there(name, root, error) from None
        if hasattr(dataset, "index"):  # iNaturalist
            categories = dataset.all_categories
            entries = [(Path(dataset.root) / categories[label] / file, label) for label, file in dataset.index]
        else:
            categories, entries = dataset.classes, list(zip(dataset._image_files, dataset._labels))
        entries = sorted((os.path.relpath(path, root), label) for path, label in entries)
        labels = Labels(np.array([label for _, label in entries], dtype=np.int64), list(categories))
        return list_of_files(name, root, [path for path, _ in entries], labels)

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

"""Images as a numpy array: .npy, or .npz with labels beside them."""

import math
import zipfile
from pathlib import Path

import numpy as np

from millionway.data.source import ArraySource, Labels
from millionway.machine import free_memory_bytes

IMAGE_NAMES = ("images", "x_train", "train_images", "x", "data", "arr_0")
LABEL_NAMES = ("labels", "y_train", "train_labels", "y", "targets", "arr_1")


def open_array(path: Path) -> ArraySource:
    """[images, height, width] or [images, height, width, 3] or [images, 3, height, width], uint8."""
    try:
        if path.suffix == ".npy":
            arrays: dict[str, np.ndarray] = {"images": np.load(path, mmap_mode="r", allow_pickle=False)}
        else:
            arrays = _unpacked(path)
    except Exception as error:  # zip, zlib and numpy have exceptions of their own
        reason = str(error) or type(error).__name__
        raise ValueError(f"--data {path}: not a numpy file of images ({reason})") from None
    pixels, labels = arrays["images"], None
    if "labels" in arrays:
        labels = _labels(arrays["labels"], len(pixels), path)
    if pixels.ndim == 4 and pixels.shape[1] == 3 and pixels.shape[3] != 3:
        pixels = pixels.transpose(0, 2, 3, 1)
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or (pixels.ndim == 4 and pixels.shape[3] != 3):
        raise ValueError(
            f"--data {path}: images are uint8 [images, height, width] or [images, height, width, 3], "
            f"not {pixels.dtype} {list(pixels.shape)}"
        )
    if len(pixels) == 0:
        raise ValueError(f"--data {path}: the array holds no image")
    return ArraySource(path.name, pixels, labels, path.stat().st_mtime_ns)


def _unpacked(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz that are wanted. How much memory they say they take is looked at first."""
    with zipfile.ZipFile(path) as archive:
        sizes = {each.filename.removesuffix(".npy"): each.file_size for each in archive.infolist()}
        images = next((name for name in IMAGE_NAMES if name in sizes), None)
        labels = next((name for name in LABEL_NAMES if name in sizes), None)
        if images is None:
            raise ValueError(f"no array called {', '.join(IMAGE_NAMES)}; there are {', '.join(sizes)}")
        wanted = {"images": images} | ({} if labels is None else {"labels": labels})
        needed, free = sum(sizes[name] for name in wanted.values()), free_memory_bytes()
        if needed > free:
            words = f"its arrays say that they take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free"
            raise ValueError(f"{words}; save them as .npy, which stays on the disk")
        return {kind: _member(archive, f"{name}.npy", sizes[name]) for kind, name in wanted.items()}


def _member(archive: zipfile.ZipFile, name: str, num_bytes: int) -> np.ndarray:
    """An array, if its header claims no more than is there."""
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(file)
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects")
    if math.prod(shape) * dtype.itemsize > num_bytes or min(shape, default=0) < 0:
        raise ValueError(f"{name} claims to be {list(shape)}, which is more than the file holds")
    with archive.open(name) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _labels(values: np.ndarray, num: int, path: Path) -> Labels:
    values = np.asarray(values).reshape(-1)
    if len(values) != num:
        raise ValueError(f"--data {path}: {num} images and {len(values)} labels")
    names, ids = np.unique(values, return_inverse=True)
    return Labels(ids.astype(np.int64), [str(name) for name in names])

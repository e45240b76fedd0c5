"""Images as a numpy array: .npy, or .npz with labels beside them."""

from pathlib import Path
from typing import Any

import numpy as np

from millionway.data.source import ArraySource, Labels

IMAGE_NAMES = ("images", "x_train", "train_images", "x", "data", "arr_0")
LABEL_NAMES = ("labels", "y_train", "train_labels", "y", "targets", "arr_1")


def open_array(path: Path) -> ArraySource:
    """[images, height, width] or [images, height, width, 3] or [images, 3, height, width], uint8."""
    try:
        content: Any = np.load(path, mmap_mode="r" if path.suffix == ".npy" else None, allow_pickle=False)
        arrays = {"images": content} if path.suffix == ".npy" else _wanted(content)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"--data {path}: not a numpy file of images ({error})") from None
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


def _wanted(content: Any) -> dict[str, np.ndarray]:
    found = {
        "images": next((name for name in IMAGE_NAMES if name in content.files), None),
        "labels": next((name for name in LABEL_NAMES if name in content.files), None),
    }
    if found["images"] is None:
        raise ValueError(f"no array called {', '.join(IMAGE_NAMES)}; there are {', '.join(content.files)}")
    return {kind: content[name] for kind, name in found.items() if name is not None}


def _labels(values: np.ndarray, num: int, path: Path) -> Labels:
    values = np.asarray(values).reshape(-1)
    if len(values) != num:
        raise ValueError(f"--data {path}: {num} images and {len(values)} labels")
    names, ids = np.unique(values, return_inverse=True)
    return Labels(ids.astype(np.int64), [str(name) for name in names])

"""All images, decoded and made small once, in one memory-mapped file: epochs after that read no JPEG."""

import fcntl
import logging
import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from millionway.data.images import UnreadableImage, check_size, decode
from millionway.data.manifest import Manifest
from millionway.data.readers import Progress, in_calls
from millionway.data.source import Source
from millionway.data.stores import FileStore
from millionway.files import remove_leftovers, replacing, reserve

log = logging.getLogger("millionway")


def side_of(image_size: int) -> int:
    """The shorter side that is kept for views of this size: 256 for 224, as is usual."""
    return -(-image_size * 8 // 7)


class PackedStore(FileStore):
    """Images by their place in the file. Boxes are still those of the images as they were."""

    def __init__(self, path: Path, source: Source, manifest: Manifest, side: int, num_threads: int) -> None:
        super().__init__(source, manifest, num_threads, 0.0)
        self.kept_sizes, self.starts = _layout(manifest, side)
        self.pixels = np.memmap(path, np.uint8, "r")
        self.takes_cores = self.shareable = True  # wherever the images were, the file is here

    def _image(self, index: int, shrink_to: int) -> np.ndarray:
        pixels = self.pixels[self.starts[index] : self.starts[index + 1]]
        return pixels.reshape(*self.kept_sizes[index], 3)


def pack(
    source: Source,
    manifest: Manifest,
    image_size: int,
    num_workers: int,
    progress: Progress | None = None,
    folder: Path | None = None,
) -> PackedStore:
    """Open the file, and make it first if it is not there. Of several processes on a machine one makes it."""
    side = side_of(image_size)
    folder = folder or Path(os.environ.get("MILLIONWAY_PIXELS", "~/.cache/millionway/pixels")).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{manifest.fingerprint}-{side}.pixels"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _make(path, source, manifest, side, num_workers, progress)
    return PackedStore(path, source, manifest, side, num_workers)


def _layout(manifest: Manifest, side: int) -> tuple[np.ndarray, np.ndarray]:
    """([images, 2] height and width in the file, [images + 1] where each begins); nothing for who cannot be read."""
    sizes = np.stack([manifest.column("height"), manifest.column("width")], axis=1).astype(np.int64)
    scale = np.minimum(1.0, side / sizes.min(axis=1).clip(min=1))
    sizes = np.round(sizes * scale[:, None]).astype(np.int64).clip(min=1) * manifest.readable[:, None]
    return sizes, np.concatenate([[0], np.cumsum(3 * sizes.prod(axis=1))])


def _make(
    path: Path,
    source: Source,
    manifest: Manifest,
    side: int,
    num_workers: int,
    progress: Progress | None,
) -> None:
    sizes, starts = _layout(manifest, side)
    remove_leftovers(path.parent, path.name)  # the lock is ours
    num_bytes, free = int(starts[-1]), shutil.disk_usage(path.parent).free
    if num_bytes > 0.95 * free:
        raise ValueError(
            f"--cache needs {num_bytes / 1e9:.1f} GB in {path.parent}, {free / 1e9:.1f} GB are free. "
            "Set MILLIONWAY_PIXELS to a folder on a larger disk, or go without --cache."
        )
    log.info("--cache: %.1f GB of pixels are kept in %s", num_bytes / 1e9, path)
    with replacing(path) as aside:
        with open(aside, "wb") as file:
            reserve(file.fileno(), path, 0, num_bytes)  # a disk that fills up says so now
            os.ftruncate(file.fileno(), num_bytes)  # where nothing could be reserved
        work = partial(_fill, source, manifest, aside, sizes, starts)
        results, calls = in_calls(work, np.flatnonzero(manifest.readable), num_workers, source.shareable)
        failed: list[str] = []
        for more in progress(results, len(calls), "keeping decoded images") if progress else results:
            failed += more
        if failed:
            raise ValueError(
                f"--cache: {len(failed)} images could be read when they were indexed and cannot now: "
                f"{'; '.join(failed[:20])}{'; ...' if len(failed) > 20 else ''}"
            )


def _fill(
    source: Source, manifest: Manifest, path: Path, sizes: np.ndarray, starts: np.ndarray, ids: np.ndarray
) -> list[str]:
    """Write these images to their places; returns what went wrong."""
    widths, heights = manifest.column("width"), manifest.column("height")
    pixels, failed = np.memmap(path, np.uint8, "r+"), []
    for index in ids:
        height, width = sizes[index].tolist()
        try:
            image = decode(source.read(int(index)), shrink_to=min(height, width))
            check_size(image, int(widths[index]), int(heights[index]))
            small = image.resize((width, height), Image.Resampling.BILINEAR)
            pixels[starts[index] : starts[index + 1]] = np.asarray(small).reshape(-1)
        except UnreadableImage as error:
            failed.append(f"{source.keys[index]}: {error}")
    return failed

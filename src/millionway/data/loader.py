"""Batches of views. An image is decoded once for all of its views of a step."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from millionway.data import views
from millionway.data.images import UnreadableImage, check_size, decode
from millionway.data.manifest import Manifest
from millionway.data.sources import Source
from millionway.data.workers import in_order

log = logging.getLogger("millionway")

Out = TypeVar("Out")

SMALL_SIDE = 128  # images up to this side live in memory, if they fit
PREFETCHED_BATCHES = 2


class TooManyUnreadable(ValueError):
    """More images failed after they were indexed than is allowed."""


class Store(Protocol):
    """Pixels by instance id."""

    heights: Tensor  # [instances] int64
    widths: Tensor
    trouble: str
    """'' or why it is time to stop: more images failed than is allowed"""

    def crops(
        self, instance_ids: Tensor, boxes: list[Tensor], size: int, flips: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Cut each box out of its image, resize it to [3, size, size], float in [0, 1], and flip those to flip.

        Returns the ids that were read (an image that fails is replaced by another of the batch), and one tensor per
        list of boxes.
        """
        ...

    def close(self) -> None: ...


class MemoryStore:
    """All images as one uint8 tensor: the ordinary case for small sets."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels  # [instances, 3, height, width]
        self.trouble = ""
        self.heights = torch.full((len(pixels),), pixels.shape[2])
        self.widths = torch.full((len(pixels),), pixels.shape[3])

    def crops(
        self, instance_ids: Tensor, boxes: list[Tensor], size: int, flips: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        images = self.pixels[instance_ids]
        return instance_ids, [views.resample(images, *each, size) for each in zip(boxes, flips or repeat(None))]

    def close(self) -> None:
        pass


class FileStore:
    """Images decoded when they are needed, by threads (Pillow lets go of the interpreter while it works)."""

    def __init__(self, source: Source, manifest: Manifest, num_threads: int, max_failed: float) -> None:
        self.source = source
        self.heights = torch.from_numpy(manifest.column("height").astype(np.int64))
        self.widths = torch.from_numpy(manifest.column("width").astype(np.int64))
        self.pool = ThreadPoolExecutor(num_threads)
        self.max_failed = max_failed
        self.failed: dict[int, str] = {}
        self.trouble = ""

    def crops(
        self, instance_ids: Tensor, boxes: list[Tensor], size: int, flips: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        none = torch.zeros(len(instance_ids), 1)
        cuts = [torch.cat([box, none if flips is None else flips[n][:, None]], dim=1) for n, box in enumerate(boxes)]
        jobs = [
            self.pool.submit(self._crop, index, cut, size)
            for index, cut in zip(instance_ids.tolist(), torch.stack(cuts, dim=1).tolist())
        ]
        results = [job.result() for job in jobs]
        good = {place: result for place, result in enumerate(results) if result is not None}
        if not good:
            raise TooManyUnreadable(f"no image of a batch could be read: {self._failures()}")
        # A failing image gives its place to the first one that works; its own row is simply not visited.
        places = [place if place in good else next(iter(good)) for place in range(len(results))]
        stacked = torch.from_numpy(np.stack([good[place] for place in places]))  # [images, boxes, size, size, 3]
        stacked = stacked.permute(1, 0, 4, 2, 3).float() / 255
        return instance_ids[places], list(stacked)

    def _crop(self, index: int, cuts: list[list[float]], size: int) -> np.ndarray | None:
        """[cuts, size, size, 3] uint8 for each (top, left, height, width, flipped), or None if the image failed."""
        full_width, full_height = int(self.widths[index]), int(self.heights[index])
        # The smallest box decides how much of a JPEG's resolution is needed; twice that leaves the resize its say.
        smallest = min(min(height, width) for _, _, height, width, _ in cuts)
        shrink_to = int(np.ceil(2 * min(full_width, full_height) * size / smallest))
        try:
            image = self._image(index, shrink_to)
        except UnreadableImage as error:
            self._report(index, str(error))
            return None
        x_scale, y_scale = image.shape[1] / full_width, image.shape[0] / full_height
        crops = np.empty((len(cuts), size, size, 3), dtype=np.uint8)
        for number, (top, left, height, width, flipped) in enumerate(cuts):
            x0, y0 = int(left * x_scale), int(top * y_scale)
            x1 = max(x0 + 1, round((left + width) * x_scale))
            y1 = max(y0 + 1, round((top + height) * y_scale))
            box = Image.fromarray(image[y0:y1, x0:x1])
            crops[number] = np.asarray(box.resize((size, size), Image.Resampling.BILINEAR))
            if flipped:
                crops[number] = crops[number, :, ::-1]
        return crops

    def _image(self, index: int, shrink_to: int) -> np.ndarray:
        """[height, width, 3] uint8, both sides at least shrink_to if it has them."""
        image = decode(self.source.read(index), shrink_to)
        check_size(image, int(self.widths[index]), int(self.heights[index]))
        return np.asarray(image)

    def _report(self, index: int, reason: str) -> None:
        if index in self.failed:
            return
        self.failed[index] = reason
        log.warning("image %d (%s) could not be read and is passed over: %s", index, self.source.keys[index], reason)
        if len(self.failed) > max(1, self.max_failed * len(self.source)):
            self.trouble = f"{len(self.failed)} images failed since the start: {self._failures()}"

    def _failures(self) -> str:
        return "; ".join(f"{self.source.keys[index]}: {reason}" for index, reason in list(self.failed.items())[:5])

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


def open_store(
    source: Source,
    manifest: Manifest,
    num_threads: int,
    max_failed: float = 0.01,
    progress: Callable[[Iterable, int, str], Iterable] | None = None,
) -> Store:
    """In memory if all images are small and of one size and take at most a quarter of it, else from files."""
    ids = np.flatnonzero(manifest.readable)
    heights, widths = manifest.column("height")[ids], manifest.column("width")[ids]
    height, width = int(heights[0]), int(widths[0])
    same_size = bool((heights == height).all() and (widths == width).all())
    num_bytes = 3 * height * width * len(manifest)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not same_size or max(height, width) > SMALL_SIDE or num_bytes > memory_bytes // 4:
        return FileStore(source, manifest, num_threads, max_failed)
    pixels = torch.zeros(len(manifest), 3, height, width, dtype=torch.uint8)

    def load(index: int) -> bool:
        """Whether the image is still what the manifest says."""
        try:
            image = decode(source.read(index))
        except UnreadableImage:
            return False
        if image.size == (width, height):
            pixels[index] = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return image.size == (width, height)

    loaded = in_order(load, ids.tolist(), num_threads, 64)
    if not all(progress(loaded, len(ids), "reading images") if progress else loaded):
        return FileStore(source, manifest, num_threads, max_failed)  # which names what fails and goes on
    return MemoryStore(pixels)


def plain_batches(
    store: Store, instance_ids: Tensor, size: int, batch_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """(images, instance_ids) without augmentation, in the order given; an image that fails is left out."""

    def read(ids: Tensor) -> tuple[Tensor, Tensor]:
        box = views.plain_boxes(store.heights[ids], store.widths[ids], size)
        read_ids, (images,) = store.crops(ids, [box], size)
        good = read_ids == ids
        return _pinned(images[good], device), ids[good]

    for images, ids in _ahead(read, instance_ids.split(batch_size), store, device):
        if store.trouble:
            raise TooManyUnreadable(store.trouble)
        yield images.to(device, non_blocking=True), ids.to(device)


def view_batches(
    store: Store,
    batches: Iterable[tuple[list[int], Tensor]],
    size: int,
    device: torch.device,
    **augmentation: float,
) -> Iterator[tuple[Tensor, Tensor]]:
    """(views, instance_ids) for each ([key of a view, ...], ids): [num_views x batch, 3, size, size], view by view."""

    def read(batch: tuple[list[int], Tensor]) -> tuple[Tensor, Tensor, list[views.ViewParameters]]:
        keys, ids = batch
        heights, widths = store.heights[ids], store.widths[ids]
        parameters = [views.draw_parameters(key, ids, heights, widths, **augmentation) for key in keys]
        boxes, flips = [each.boxes for each in parameters], [each.flip for each in parameters]
        read_ids, crops = store.crops(ids, boxes, size, flips)
        return _pinned(torch.cat(crops), device), read_ids.repeat(len(keys)), parameters

    for crops, ids, parameters in _ahead(read, batches, store, device):
        on_device = crops.to(device, non_blocking=True)
        yield views.distort(on_device, views.join(parameters, device)), ids.to(device)


def _pinned(images: Tensor, device: torch.device) -> Tensor:
    """In memory that a GPU copies from while others work."""
    return images.pin_memory() if device.type == "cuda" else images


def _ahead(read: Callable[[Any], Out], batches: Iterable, store: Store, device: torch.device) -> Iterator[Out]:
    """Read the next batches while this one is worked on; not if that would only take its cores away."""
    is_same_work = isinstance(store, MemoryStore) and device.type == "cpu"
    return in_order(read, batches, 0 if is_same_work else 1, PREFETCHED_BATCHES)

"""Pixels by instance id: all in memory, or read from files when they are needed."""

import logging
import math
import mmap
import threading
import weakref
from collections.abc import Callable
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from millionway.data import views
from millionway.data.images import UnreadableImage, check_size, decode, pixels_of
from millionway.data.kinds.choose import Source
from millionway.data.manifest import Manifest
from millionway.data.readers import Progress, Workers, by_processes, in_calls
from millionway.data.views import ViewParameters
from millionway.machine import memory_bytes, num_local_ranks

log = logging.getLogger("millionway")

SMALL_SIDE = 128  # images up to this side live in memory, if they fit
SPACE_BYTES, NUM_SPACES = 1 << 28, 3  # for crops on their way; larger batches go in parts


class TooManyUnreadable(ValueError):
    """More images failed after they were indexed than is allowed."""


class Store(Protocol):
    """Pixels by instance id."""

    heights: Tensor  # [instances] int64
    widths: Tensor
    trouble: str
    """'' or why it is time to stop: more images failed than is allowed"""
    takes_cores: bool
    """whether reading is work for the processor, and not waiting for somebody else"""

    def crops(self, instance_ids: Tensor, boxes: list[Tensor], size: int) -> tuple[Tensor, Tensor]:
        """Cut each box out of its image and resize it to [3, size, size].

        Returns the ids that were read (an image that fails is replaced by another of the batch), and the crops: those
        of the first boxes, then those of the second, ...; float in [0, 1], or uint8 where they were stored so.
        """
        ...

    def views(
        self, instance_ids: Tensor, parameters: list[ViewParameters], size: int, distorted: bool
    ) -> tuple[Tensor, Tensor]:
        """The same with the boxes of the parameters, flipped; distorted: float, and distorted, by this processor."""
        ...

    def close(self) -> None: ...


class MemoryStore:
    """All images as one uint8 tensor: the ordinary case for small sets."""

    takes_cores = True

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels  # [instances, 3, height, width]
        self.trouble = ""
        self.heights = torch.full((len(pixels),), pixels.shape[2])
        self.widths = torch.full((len(pixels),), pixels.shape[3])

    def crops(self, instance_ids: Tensor, boxes: list[Tensor], size: int) -> tuple[Tensor, Tensor]:
        images = self.pixels[instance_ids].repeat(len(boxes), 1, 1, 1)
        return instance_ids, views.resample(images, torch.cat(boxes), None, size)

    def views(
        self, instance_ids: Tensor, parameters: list[ViewParameters], size: int, distorted: bool
    ) -> tuple[Tensor, Tensor]:
        images, all_views = self.pixels[instance_ids].repeat(len(parameters), 1, 1, 1), views.join(parameters)
        crops = views.resample(images, all_views.boxes, all_views.flip, size)
        return instance_ids, views.distort(crops, all_views) if distorted else crops

    def close(self) -> None:
        pass


class Cuts(NamedTuple):
    """Work for one worker."""

    number: int
    """of the space"""
    shape: tuple[int, ...]
    """of what is in the space: [views, images, 3, size, size]"""
    first: int
    """place of the first of these images"""
    ids: list[int]
    cuts: list[list[list[float]]]
    """of each image, of each view: top, left, height, width, flipped"""
    parameters: list[dict[str, np.ndarray]] | None
    """of each view, if it is to be distorted; as arrays, because a tensor travels by a file of its own"""


def _numbers(parameters: ViewParameters, start: int, stop: int) -> dict[str, np.ndarray]:
    return {name: getattr(parameters, name)[start:stop].numpy() for name in views.NAMES}


class FileStore:
    """Images decoded when they are needed, by processes of their own, or threads if there are few images."""

    def __init__(self, source: Source, manifest: Manifest, num_workers: int, max_failed: float) -> None:
        self.source = source
        self.num_workers = num_workers
        self.max_failed = max_failed
        self.sizes = np.stack([manifest.column("height"), manifest.column("width")], axis=1).astype(np.int64)
        self.heights, self.widths = torch.from_numpy(self.sizes).unbind(dim=1)
        self.takes_cores = self.shareable = source.shareable
        self.failed: dict[int, str] = {}
        self.trouble = ""
        # Memory that processes share with this one. The first space is never handed out.
        self.spaces = [mmap.mmap(-1, SPACE_BYTES) for _ in range(NUM_SPACES)]
        self.in_use: list[Callable[[], np.ndarray | None]] = [lambda: None] * NUM_SPACES
        self.lock = threading.Lock()  # an evaluation may read while the next training batches are read ahead

    @cached_property
    def workers(self) -> Workers["Cuts", list[tuple[int, str]]]:
        processes = by_processes(self.shareable, self.num_workers, len(self.source))
        return Workers(self._cut, self.num_workers, processes)

    def crops(self, instance_ids: Tensor, boxes: list[Tensor], size: int) -> tuple[Tensor, Tensor]:
        not_flipped = torch.zeros(len(instance_ids), 1)
        with self.lock:
            return self._read(instance_ids, [torch.cat([box, not_flipped], dim=1) for box in boxes], size, None)

    def views(
        self, instance_ids: Tensor, parameters: list[ViewParameters], size: int, distorted: bool
    ) -> tuple[Tensor, Tensor]:
        cuts = [torch.cat([each.boxes, each.flip[:, None]], dim=1) for each in parameters]
        with self.lock:
            return self._read(instance_ids, cuts, size, parameters if distorted else None)

    def _read(
        self, instance_ids: Tensor, cuts: list[Tensor], size: int, parameters: list[ViewParameters] | None
    ) -> tuple[Tensor, Tensor]:
        """Workers leave their crops in a space; the batch is that space, or a copy if it does not fit or is in use."""
        num, dtype = len(instance_ids), torch.uint8 if parameters is None else torch.float32
        at_once = max(1, SPACE_BYTES // (len(cuts) * 3 * size**2 * dtype.itemsize))
        number = next((n for n in range(1, NUM_SPACES) if self.in_use[n]() is None), 0) if num <= at_once else 0
        out = None if number else torch.empty(len(cuts), num, 3, size, size, dtype=dtype)
        ids, all_cuts = instance_ids.tolist(), torch.stack(cuts, dim=1).tolist()
        good = torch.ones(num, dtype=torch.bool)
        for start in range(0, num, at_once):
            some = slice(start, min(num, start + at_once))
            share = -(-(some.stop - start) // (16 * self.num_workers))  # small, so that all end together
            items = [
                Cuts(
                    number,
                    (len(cuts), some.stop - start, 3, size, size),
                    first - start,
                    ids[first : min(first + share, some.stop)],
                    all_cuts[first : min(first + share, some.stop)],
                    None if parameters is None else [_numbers(p, first, first + share) for p in parameters],
                )
                for first in range(start, some.stop, share)
            ]
            for place, reason in (failure for found in self.workers.all(items) for failure in found):
                good[start + place] = False
                self._report(ids[start + place], reason)
            space = self._space(number, items[0].shape, dtype)
            if out is None:
                self.in_use[number] = weakref.ref(space)  # a tensor keeps it alive, whoever has it
                out = torch.from_numpy(space)
            else:
                out[:, some] = torch.from_numpy(space)
        assert out is not None
        if not good.any():
            raise TooManyUnreadable(f"no image of a batch could be read: {self._failures()}")
        # A failing image gives its place to the first one that works; its own row is simply not visited.
        places = torch.where(good, torch.arange(num), good.int().argmax())
        if not good.all():
            out[:, ~good] = out[:, places[~good]]
        return instance_ids[places], out.flatten(0, 1)

    def _space(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> np.ndarray:
        kind = np.uint8 if dtype == torch.uint8 else np.float32
        return np.frombuffer(self.spaces[number], kind, math.prod(shape)).reshape(shape)

    def _cut(self, item: "Cuts") -> list[tuple[int, str]]:
        """Leave the crops of some images in the space; returns (place, reason) of failures."""
        dtype = torch.uint8 if item.parameters is None else torch.float32
        space = self._space(item.number, item.shape, dtype)
        failed, crops = [], np.empty((item.shape[0], *item.shape[2:]), dtype=np.uint8)
        for n, (index, cuts) in enumerate(zip(item.ids, item.cuts)):
            try:
                self._crop(index, cuts, crops)
            except UnreadableImage as error:
                failed.append((item.first + n, str(error)))
                continue
            if item.parameters is None:
                space[:, item.first + n] = crops
            else:
                own = {
                    name: torch.from_numpy(np.stack([each[name][n] for each in item.parameters]))
                    for name in views.NAMES
                }
                space[:, item.first + n] = views.distort(torch.from_numpy(crops), ViewParameters(**own), 1).numpy()
        return failed

    def _crop(self, index: int, cuts: list[list[float]], out: np.ndarray) -> None:
        """out: [cuts, 3, size, size] uint8."""
        full_height, full_width = self.sizes[index].tolist()
        size = out.shape[-1]
        # The smallest box decides how much of a JPEG's resolution is needed; twice that leaves the resize its say.
        smallest = min(min(height, width) for _, _, height, width, _ in cuts)
        image = self._image(index, math.ceil(2 * min(full_width, full_height) * size / smallest))
        x_scale, y_scale = image.shape[1] / full_width, image.shape[0] / full_height
        for crop, (top, left, height, width, flipped) in zip(out, cuts):
            x0, y0 = int(left * x_scale), int(top * y_scale)
            x1 = max(x0 + 1, round((left + width) * x_scale))
            y1 = max(y0 + 1, round((top + height) * y_scale))
            box = torch.from_numpy(image[y0:y1, x0:x1].copy()).permute(2, 0, 1)
            small = F.interpolate(box[None], (size, size), mode="bilinear", antialias=True)[0, :3]
            torch.from_numpy(crop).copy_(small.flip(2) if flipped else small)

    def _image(self, index: int, shrink_to: int) -> np.ndarray:
        """[height, width, 3 or more] uint8, both sides at least shrink_to, if it has them."""
        image = decode(self.source.read(index), shrink_to)
        height, width = self.sizes[index].tolist()
        check_size(image, width, height)
        return pixels_of(image)

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
        if "workers" in self.__dict__:
            self.workers.close()


def open_store(
    source: Source,
    manifest: Manifest,
    num_threads: int,
    max_failed: float = 0.01,
    progress: Progress | None = None,
    num_in_all: int | None = None,
) -> Store:
    """In memory if all images are small and of one size and take at most a quarter of this rank's, else from files.

    num_in_all: if these are only some of them.
    """
    ids = np.flatnonzero(manifest.readable)
    heights, widths = manifest.column("height")[ids], manifest.column("width")[ids]
    height, width = int(heights[0]), int(widths[0])
    same_size = bool((heights == height).all() and (widths == width).all())
    num_bytes = 3 * height * width * (num_in_all or len(manifest))
    room = memory_bytes() // (4 * num_local_ranks())
    if not same_size or max(height, width) > SMALL_SIDE or num_bytes > room:
        return FileStore(source, manifest, num_threads, max_failed)
    pixels = torch.zeros(len(manifest), 3, height, width, dtype=torch.uint8)

    loaded, calls = in_calls(partial(_load, source, width, height), ids, num_threads, source.shareable)
    for places, found in zip(calls, progress(loaded, len(calls), "reading images") if progress else loaded):
        if found is None:
            return FileStore(source, manifest, num_threads, max_failed)  # which names what fails and goes on
        pixels[places] = torch.from_numpy(found)
    return MemoryStore(pixels)


def _load(source: Source, width: int, height: int, places: np.ndarray) -> np.ndarray | None:
    """[places, 3, height, width] uint8; None if an image is not what the manifest says."""
    pixels = np.empty((len(places), 3, height, width), dtype=np.uint8)
    for out, place in zip(pixels, places):
        try:
            image = decode(source.read(int(place)))
        except UnreadableImage:
            return None
        if image.size != (width, height):
            return None
        out[:] = np.asarray(image).transpose(2, 0, 1)
    return pixels

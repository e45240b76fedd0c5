"""Batches of views. An image is decoded once for all of its views of a step."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from millionway.data import views
from millionway.data.readers import in_order
from millionway.data.stores import Store, TooManyUnreadable
from millionway.data.views import ViewParameters

Out = TypeVar("Out")

PREFETCHED_BATCHES = 2


def plain_batches(
    store: Store, instance_ids: Tensor, size: int, batch_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """(images, instance_ids) without augmentation, in the order given; an image that fails is left out."""

    def read(ids: Tensor) -> tuple[Tensor, Tensor]:
        box = views.plain_boxes(store.heights[ids], store.widths[ids], size)
        read_ids, images = store.crops(ids, [box], size)
        good = read_ids == ids
        return _pinned(images[good], device), _pinned(ids[good], device)

    for images, ids in _ahead(read, instance_ids.split(batch_size), store, device):
        if store.trouble:
            raise TooManyUnreadable(store.trouble)
        images = images.to(device, non_blocking=True)
        yield images if images.is_floating_point() else images / 255, ids.to(device, non_blocking=True)


def view_batches(
    store: Store,
    batches: Iterable[tuple[list[int], Tensor]],
    size: int,
    device: torch.device,
    **augmentation: float,
) -> Iterator[tuple[Tensor, Tensor]]:
    """(views, instance_ids) for each ([key of a view, ...], ids): [num_views x batch, 3, size, size], view by view."""

    on_cpu = device.type == "cpu"

    def read(batch: tuple[list[int], Tensor]) -> tuple[Tensor, Tensor, list[ViewParameters]]:
        keys, ids = batch
        heights, widths = store.heights[ids], store.widths[ids]
        parameters = [views.draw_parameters(key, ids, heights, widths, **augmentation) for key in keys]
        read_ids, made = store.views(ids, parameters, size, distorted=on_cpu)
        return _pinned(made, device), _pinned(read_ids.repeat(len(keys)), device), parameters

    for made, ids, parameters in _ahead(read, batches, store, device):
        if on_cpu:
            yield made, ids
        else:
            on_device = made.to(device, non_blocking=True)
            yield views.distort(on_device, views.join(parameters)), ids.to(device, non_blocking=True)


def _pinned(numbers: Tensor, device: torch.device) -> Tensor:
    """In memory that a GPU copies from while others work."""
    return numbers.pin_memory() if device.type == "cuda" else numbers


def _ahead(read: Callable[[Any], Out], batches: Iterable, store: Store, device: torch.device) -> Iterator[Out]:
    """Read the next batches while this one is worked on; not if that would only take its cores away."""
    is_same_work = store.takes_cores and device.type == "cpu"
    return in_order(read, batches, 0 if is_same_work else 1, PREFETCHED_BATCHES)

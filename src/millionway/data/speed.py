"""How fast are a user's own images? Some of them, read and made into views, each for a few seconds."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from millionway.console import track
from millionway.data.batches import view_batches
from millionway.data.dataset import Dataset, open_some
from millionway.data.images import UnreadableImage
from millionway.data.packed import pack
from millionway.data.readers import in_order
from millionway.data.stores import FileStore, Store
from millionway.machine import prepare
from millionway.settings.bench import Bench
from millionway.settings.pretrain import Pretrain, with_settings
from millionway.settings.resolve import Facts, resolve

NUM_IMAGES = 2048
READ_AT_ONCE = 64
SECONDS = 5.0


def measure(asked: Bench) -> dict[str, float]:
    """Images per second of reading, of the views that pretrain would make, and of those with --cache."""
    device, num_threads = prepare("auto", asked.threads)
    dataset, num_images = open_some(asked.data, asked.data_root, NUM_IMAGES, num_threads, track)
    config = with_settings(Pretrain(data=asked.data, out=Path()), image_size=asked.image_size)
    config = resolve(config, Facts(num_images, dataset.small_side(), device.type != "cpu", num_cores=num_threads))
    views, size = partial(_views, dataset, device, config), config.images.image_size
    assert size is not None
    speeds = {}
    if isinstance(dataset.store, FileStore):
        speeds["read"] = _rate(_read(dataset, num_threads))
    speeds["views"] = _rate(views(dataset.store))
    if isinstance(dataset.store, FileStore):
        with tempfile.TemporaryDirectory() as folder, suppress(ValueError):  # where it does not fit, it is left out
            store = pack(dataset.source, dataset.manifest, size, num_threads, track, Path(folder))
            speeds["views with --cache"] = _rate(views(store))
            store.close()
    dataset.store.close()
    return speeds


def advice(speeds: dict[str, float]) -> str:
    """What limits, and what helps."""
    words = f"An encoder that trains on more than {speeds['views']:,.0f} images per second waits for data."
    if speeds.get("read", float("inf")) < 1.5 * speeds["views"]:
        return f"{words} Reading takes most of the time: a faster disk, tar shards, or --cache help."
    if speeds.get("views with --cache", 0) > 1.3 * speeds["views"]:
        return f"{words} Decoding takes much of the time: --cache, smaller files or more --threads help."
    return f"{words} Making the views takes most of the time: a smaller --image-size or more --threads help."


def _rate(counts: Iterator[int]) -> float:
    """Images per second; the first count warms up."""
    next(counts)
    started, num = time.perf_counter(), 0
    for count in counts:
        num += count
        if time.perf_counter() - started > SECONDS:
            break
    return num / (time.perf_counter() - started)


def _endless_ids(dataset: Dataset, batch_size: int) -> Iterator[torch.Tensor]:
    ids = dataset.instance_ids
    while True:
        yield from ids[torch.randperm(len(ids))].split(batch_size)


def _read(dataset: Dataset, num_threads: int) -> Iterator[int]:
    """From where the system has them: files that were just looked at may still be in memory."""

    def read(ids: torch.Tensor) -> int:
        for index in ids.tolist():
            with suppress(UnreadableImage):
                dataset.source.read(index)
        return len(ids)

    return in_order(read, _endless_ids(dataset, READ_AT_ONCE), num_threads, 2 * num_threads)


def _views(dataset: Dataset, device: torch.device, config: Pretrain, store: Store) -> Iterator[int]:
    num_views, batch_size, size = config.augmentation.views, config.training.batch_size, config.images.image_size
    assert batch_size and size
    ids = enumerate(_endless_ids(dataset, batch_size))
    batches = (([num_views * number + view for view in range(num_views)], some) for number, some in ids)
    for _, ids in view_batches(store, batches, size, device, **config.augmentation.of_a_view):
        yield len(ids) // num_views

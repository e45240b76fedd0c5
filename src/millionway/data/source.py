"""What every kind of data looks like: numbered images with stable keys, and perhaps labels."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from millionway import randomness
from millionway.data.images import UnreadableImage


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


def labels_from(texts: list[str], is_test: np.ndarray | None = None) -> Labels | None:
    """Labels from one word per image, '' where unknown; None unless there are two different ones."""
    names = sorted(set(texts) - {""})
    if all(name.isdecimal() for name in names):
        names.sort(key=int)
    if len(names) < 2:
        return None
    number = {name: index for index, name in enumerate(names)} | {"": -1}
    return Labels(np.array([number[text] for text in texts], dtype=np.int64), names, is_test)


def key_of_path(relative_path: str) -> str:
    """The path as text that any file format can hold; bytes that are not UTF-8 are spelled out."""
    return os.fsencode(relative_path).decode("utf-8", "backslashreplace").replace(os.sep, "/")


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

"""What every kind of data looks like: numbered images with stable keys, and perhaps labels."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import torch

from millionway import randomness
from millionway.data.arrow_files import pc
from millionway.data.images import UnreadableImage

Answer = TypeVar("Answer")

KEYS_PER_CHUNK = 1 << 20
NUM_TRIES = 3
WAIT_SECONDS = 1.0
GONE = (-1, 0)  # the status of an image that is not there


class Keys(Sequence[str]):
    """Texts in an Arrow column: millions of them cost no more than their letters."""

    def __init__(self, texts: Iterable[str] | pa.ChunkedArray) -> None:
        self.arrow: Any = texts if isinstance(texts, pa.ChunkedArray) else _column(texts)

    def __len__(self) -> int:
        return len(self.arrow)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.arrow[index].to_pylist()
        return self.arrow[int(index)].as_py()

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), KEYS_PER_CHUNK):
            yield from self.arrow.slice(start, KEYS_PER_CHUNK).to_pylist()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Keys):
            return self.arrow.equals(other.arrow)
        return isinstance(other, Sequence) and list(self) == list(other)

    def places_of(self, others: "Keys") -> np.ndarray:
        """[others] where each of the other texts is here, -1 if nowhere."""
        return pc.fill_null(pc.index_in(others.arrow, value_set=self.arrow), -1).to_numpy().astype(np.int64)

    def take(self, places: np.ndarray) -> "Keys":
        """Arrow would put all texts into one array first, which ends at 2 GiB of letters."""
        places = places.astype(np.int64)
        chunks = [self._take(places[at : at + KEYS_PER_CHUNK]) for at in range(0, len(places), KEYS_PER_CHUNK)]
        return Keys(pa.chunked_array(chunks, self.arrow.type))

    def _take(self, places: np.ndarray) -> pa.Array:
        ends = self._ends
        chunk_of = np.searchsorted(ends, places, side="right")
        order = np.argsort(chunk_of, kind="stable")
        numbers, first = np.unique(chunk_of[order], return_index=True)
        parts = []
        for number, some in zip(numbers.tolist(), np.split(places[order], first[1:])):
            chunk = self.arrow.chunk(number)
            parts.append(chunk.take(pa.array(some - (ends[number] - len(chunk)))))
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return pa.concat_arrays(parts).take(pa.array(back))

    @cached_property
    def _ends(self) -> np.ndarray:
        """[chunks] the place behind the last text of each."""
        return np.cumsum([len(chunk) for chunk in self.arrow.chunks], dtype=np.int64)

    def repeated(self) -> list[str]:
        """Texts that are there more than once."""
        if len(pc.unique(self.arrow)) == len(self):
            return []
        counts = self.arrow.value_counts()
        return counts.filter(pc.greater(counts.field("counts"), 1)).field("values").to_pylist()


def _column(texts: Iterable[str]) -> pa.ChunkedArray:
    chunks, waiting = [], []
    for text in texts:
        waiting.append(text)
        if len(waiting) == KEYS_PER_CHUNK:
            chunks.append(pa.array(waiting, pa.string()))
            waiting = []
    return pa.chunked_array([*chunks, pa.array(waiting, pa.string())])


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
    def keys(self) -> Keys: ...

    @property
    def labels(self) -> Labels | None: ...

    def __len__(self) -> int: ...

    @property
    def shareable(self) -> bool:
        """Whether forked processes may read it too."""
        ...

    def statuses(self, places: np.ndarray) -> np.ndarray:
        """[places, 2] int64: bytes as stored, -1 if it is gone; when written, in nanoseconds, 0 if nobody knows.

        Cheap, so that a changed image can be noticed.
        """
        ...

    def read(self, index: int) -> bytes | np.ndarray:
        """The encoded file, or the pixels of an image that lives in memory. Raises UnreadableImage."""
        ...


def labels_from(texts: Keys, is_test: np.ndarray | None = None) -> Labels | None:
    """Labels from one word per image, '' where unknown; None unless there are two different ones."""
    names = sorted(set(pc.unique(texts.arrow).to_pylist()) - {""})
    if all(name.isdecimal() for name in names):
        names.sort(key=int)
    if len(names) < 2:
        return None
    return Labels(Keys(names).places_of(texts), names, is_test)


def patiently(ask: Callable[[], Answer], is_passing: Callable[[Exception], bool]) -> Answer:
    """A disk or network that fails once is asked again."""
    for attempt in range(NUM_TRIES - 1):
        try:
            return ask()
        except Exception as error:  # every file system has errors of its own
            if not is_passing(error):
                raise
            time.sleep(WAIT_SECONDS * 2**attempt)
    return ask()


def read_patiently(read: Callable[[], bytes], is_passing: Callable[[Exception], bool]) -> bytes:
    """The same for an image; what is said at last is raised as UnreadableImage."""
    try:
        return patiently(read, is_passing)
    except UnreadableImage:
        raise
    except Exception as error:
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UnreadableImage(words or type(error).__name__) from None


def key_of_path(relative_path: str) -> str:
    r"""The path as text that any file format can hold, another one for each path.

    Bytes that are not UTF-8 are spelled out, \xff, and so that no other name looks like that, \ is doubled.
    """
    text = relative_path.replace(os.sep, "/").replace("\\", "\\\\")
    return os.fsencode(text).decode("utf-8", "backslashreplace")


@dataclass
class ArraySource:
    """Images that live in memory: [images, height, width] or [images, height, width, 3], uint8."""

    name: str
    pixels: np.ndarray
    labels: Labels | None = None
    written: int = 0
    """when its file was, in nanoseconds"""
    keys: Keys = field(init=False)
    shareable: bool = True

    def __post_init__(self) -> None:
        self.keys = Keys(f"{self.name}/{index:06d}" for index in range(len(self.pixels)))

    def __len__(self) -> int:
        return len(self.pixels)

    def statuses(self, places: np.ndarray) -> np.ndarray:
        return np.tile(np.array([self.pixels[:1].nbytes, self.written], dtype=np.int64), (len(places), 1))

    def read(self, index: int) -> np.ndarray:
        return np.ascontiguousarray(self.pixels[index])


@dataclass
class Part:
    """Some images of a source, or all in another order."""

    source: Source
    places: np.ndarray
    """[images] in the source; -1 for an image that is gone"""
    keys: Keys
    labels: Labels | None = None

    @property
    def name(self) -> str:
        return self.source.name

    def __len__(self) -> int:
        return len(self.places)

    @property
    def shareable(self) -> bool:
        return self.source.shareable

    def statuses(self, places: np.ndarray) -> np.ndarray:
        theirs = self.places[places]
        found = np.tile(np.array(GONE, dtype=np.int64), (len(places), 1))
        found[theirs >= 0] = self.source.statuses(theirs[theirs >= 0])
        return found

    def read(self, index: int) -> bytes | np.ndarray:
        if self.places[index] < 0:
            raise UnreadableImage("the image is gone")
        return self.source.read(int(self.places[index]))


def some_of(source: Source, num: int) -> Source:
    """So many images of the source, the same ones each time, in its order."""
    if num >= len(source):
        return source
    order = torch.randperm(len(source), generator=randomness.generator(0, "some images"))
    places = order[:num].sort().values.numpy()
    labels = source.labels
    if labels is not None:
        labels = Labels(labels.ids[places], labels.names, None if labels.is_test is None else labels.is_test[places])
    return Part(source, places, source.keys.take(places), labels)

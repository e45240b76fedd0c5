"""What every image looks like at small scale: a thumbnail, 32 x 32 pixels, brightness, contrast, color.

One pass over the images; every few thousand of them are kept, so that an interrupted pass goes on where it was.
"""

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
from PIL import Image

from millionway.data.arrow_files import read_arrow, write_arrow
from millionway.data.images import UnreadableImage, decode
from millionway.data.readers import Progress, in_calls
from millionway.data.source import Source

THUMBNAIL_SIDE = 96  # the longer one
SMALL_SIDE = 32
IMAGES_PER_FILE = 4096
SCHEMA = pa.schema(
    [
        ("thumbnail", pa.binary()),
        ("small", pa.binary(3 * SMALL_SIDE**2)),
        ("brightness", pa.float32()),
        ("contrast", pa.float32()),
        ("color", pa.float32()),
    ]
)


@dataclass(frozen=True)
class Looks:
    """Of some images, in their order; null and NaN for an image that cannot be read."""

    NUMBERS: ClassVar = ("brightness", "contrast", "color")

    table: pa.Table

    def __len__(self) -> int:
        return self.table.num_rows

    def thumbnail(self, place: int) -> bytes | None:
        """JPEG or PNG."""
        return self.table["thumbnail"][place].as_py()

    def small(self, places: np.ndarray) -> np.ndarray:
        """[places, 32, 32, 3] uint8; black where the image could not be read."""
        found = self.table["small"].take(pa.array(places)).to_pylist()
        none = bytes(3 * SMALL_SIDE**2)
        pixels = np.frombuffer(b"".join(none if each is None else each for each in found), np.uint8)
        return pixels.reshape(len(places), SMALL_SIDE, SMALL_SIDE, 3)

    @property
    def there(self) -> np.ndarray:
        return self.table["thumbnail"].is_valid().to_numpy()

    def column(self, name: str) -> np.ndarray:
        return self.table[name].to_numpy()


def look(source: Source, ids: np.ndarray, folder: Path, num_workers: int, progress: Progress | None = None) -> Looks:
    """Of the images with these ids; files that the folder holds already are not made again."""
    folder.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(ids), IMAGES_PER_FILE)
    missing = [start for start in starts if not _file(folder, start).is_file()]
    steps = _make(source, ids, missing, folder, num_workers)
    total = sum(len(ids[start : start + IMAGES_PER_FILE]) for start in missing)
    for _ in progress(steps, total, "looking at images") if progress and missing else steps:
        pass
    return Looks(pa.concat_tables([SCHEMA.empty_table(), *(read_arrow(_file(folder, start)) for start in starts)]))


def _file(folder: Path, start: int) -> Path:
    return folder / f"{start:09d}.arrow"


def _make(source: Source, ids: np.ndarray, starts: list[int], folder: Path, num_workers: int) -> Iterator[None]:
    for start in starts:
        some, rows = ids[start : start + IMAGES_PER_FILE], []
        found, _ = in_calls(partial(_look, source), some, num_workers, source.shareable)
        for part in found:
            rows += part
            yield from (None for _ in part)
        columns = [pa.array(values, field.type) for values, field in zip(zip(*rows), SCHEMA)]
        write_arrow(_file(folder, start), SCHEMA, [pa.record_batch(columns, schema=SCHEMA)])


def _look(source: Source, ids: np.ndarray) -> list[tuple[bytes | None, bytes | None, float, float, float]]:
    return [_look_at(source, instance_id) for instance_id in ids.tolist()]


def _look_at(source: Source, instance_id: int) -> tuple[bytes | None, bytes | None, float, float, float]:
    try:
        image = decode(source.read(instance_id), shrink_to=SMALL_SIDE * 2)
    except UnreadableImage:
        return None, None, math.nan, math.nan, math.nan
    small = small_pixels(image)
    pixels = small.astype(np.float32) / 255
    gray = pixels.mean(axis=2)
    color = float((pixels.max(axis=2) - pixels.min(axis=2)).mean())
    return thumbnail(image, THUMBNAIL_SIDE), small.tobytes(), float(gray.mean()), float(gray.std()), color


def small_pixels(image: Image.Image) -> np.ndarray:
    """[32, 32, 3] uint8: the whole image, whatever its aspect."""
    return np.asarray(image.resize((SMALL_SIDE, SMALL_SIDE), Image.Resampling.BOX if _is_larger(image) else BILINEAR))


BILINEAR = Image.Resampling.BILINEAR


def _is_larger(image: Image.Image) -> bool:
    return min(image.size) >= SMALL_SIDE


def thumbnail(image: Image.Image, side: int) -> bytes:
    """At most so large; PNG for what has few pixels, JPEG for the rest."""
    scale = side / max(image.size)
    if scale < 1:
        image = image.resize(
            (max(1, round(image.width * scale)), max(1, round(image.height * scale))), Image.Resampling.BILINEAR
        )
    buffer = io.BytesIO()
    if image.width * image.height <= 48 * 48:
        image.save(buffer, "PNG")
    else:
        image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()

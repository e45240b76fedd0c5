"""Any picture file as 8-bit RGB.

Decided here, once: the first frame of an animation; EXIF rotation applied; transparency over white; 16-bit gray scaled
to 8 bits; CMYK, palette and the rest by Pillow's own conversion. Only decoders of the formats listed here are ever
tried: Pillow knows others, one of which starts another program. What is larger than the limits is not decoded.
"""

import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from millionway.settings.pretrain import MAX_IMAGE_BYTES, MAX_PIXELS

EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".avif", ".tga", ".ico", ".heic", ".heif"}
)
HEIF_EXTENSIONS = frozenset({".heic", ".heif"})
RAW_EXTENSIONS = frozenset({".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".rw2", ".raf", ".pef", ".srw"})
VIDEO_EXTENSIONS = frozenset({".mp4", ".mov", ".m4v", ".avi", ".mkv", ".webm", ".mts", ".mpg"})
SEVERAL_FRAMES = " of several"
"""after the mode of an image that has more than one frame or page"""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA", "ICO")  # by Pillow's names
HEIF_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}

ROTATION_KEYS = {"exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp"}  # where Pillow looks for a rotation
NEAR_EMPTY = 2.0
MAX_NAMED = 6
SOME_PLACES = ((4, 4), (2, 2), (6, 6), (2, 6), (6, 2), (4, 1), (4, 7), (1, 4), (7, 4))  # in eighths of an image


class UnreadableImage(ValueError):
    """An image that cannot be decoded, with the reason in words a user can act on."""


@dataclass
class Limits:
    """What one image may take."""

    max_pixels: int = MAX_PIXELS
    """of width x height; decoded, four bytes each"""
    max_bytes: int = MAX_IMAGE_BYTES
    """of the file"""


limits = Limits()
"""of this process, and of those that it forks to read images"""


def set_limits(max_pixels: int, max_bytes: int) -> None:
    limits.max_pixels, limits.max_bytes = max_pixels, max_bytes
    # Pillow has a guard of its own, which warns above its limit and refuses twice as much.
    Image.MAX_IMAGE_PIXELS = max_pixels
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def check_bytes(num_bytes: int) -> None:
    """Refuse a file before it is read."""
    if num_bytes > limits.max_bytes:
        words = f"too large: {num_bytes / 1e6:,.0f} MB, and {limits.max_bytes / 1e6:,.0f} MB are allowed"
        raise UnreadableImage(f"{words}; store a smaller copy, or raise --max-image-bytes")


def _check_pixels(width: int, height: int) -> None:
    if width * height > limits.max_pixels:
        words = f"too many pixels: {width} x {height}, and {limits.max_pixels / 1e6:,.0f} million are allowed"
        raise UnreadableImage(f"{words}; store a smaller copy, or raise --max-pixels")


@cache
def _formats() -> tuple[str, ...]:
    """Those of FORMATS that this Pillow was built with, and HEIF where pillow-heif is installed."""
    Image.init()
    there = tuple(name for name in FORMATS if name in Image.OPEN)
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        return there
    register_heif_opener()
    return (*there, "HEIF")


def extensions() -> frozenset[str]:
    """Of the files that can be read here."""
    return EXTENSIONS if "HEIF" in _formats() else EXTENSIONS - HEIF_EXTENSIONS


def ignored(counts: Mapping[str, int]) -> str:
    """Files that are passed over, by their extensions, and what helps: '3 files ignored: .heic; install ...'"""
    remedies = (
        (HEIF_EXTENSIONS, "pip install 'millionway[heic]' to read them"),
        (RAW_EXTENSIONS, "RAW photos, which need to be developed to JPEG or TIFF first"),
        (VIDEO_EXTENSIONS, "videos, of which no frame is taken"),
    )
    left, parts = dict(counts), []
    for kinds, remedy in remedies:
        there = {name: left.pop(name) for name in sorted(kinds & left.keys())}
        if there:
            parts.append(f"{sum(there.values()):,} {' '.join(there)} ({remedy})")
    if left:
        names = sorted(left, key=lambda name: -left[name])
        shown = " ".join(name or "without an extension" for name in names[:MAX_NAMED])
        parts.append(f"{sum(left.values()):,} {shown}{' ...' if len(names) > MAX_NAMED else ''}")
    return f"{sum(counts.values()):,} files ignored: {'; '.join(parts)}"


def decode(data: bytes | np.ndarray, shrink_to: int | None = None, upright: bool = True) -> Image.Image:
    """An RGB image from an encoded file, or from a [height, width] or [height, width, 3] uint8 array.

    shrink_to: the caller needs no side shorter than this many pixels, so a JPEG may be decoded at 1/2, 1/4 or 1/8.
    upright: turned as its EXIF block says.
    """
    return decode_with_mode(data, shrink_to, upright)[0]


def decode_with_mode(
    data: bytes | np.ndarray, shrink_to: int | None = None, upright: bool = True
) -> tuple[Image.Image, str]:
    """(as decode(), the mode in which it is stored, by Pillow's names: RGB, L, P, RGBA, CMYK, I;16, ...).

    Of an animation or a file of several pages the first is taken, and the mode says so.
    """
    if isinstance(data, np.ndarray):
        image = Image.fromarray(data)
        return image.convert("RGB"), image.mode
    if not data:
        raise UnreadableImage("empty file")
    assert not ImageFile.LOAD_TRUNCATED_IMAGES, "a truncated image must raise"
    check_bytes(len(data))
    try:
        with Image.open(io.BytesIO(data), formats=_formats()) as image:
            mode = image.mode + (SEVERAL_FRAMES if _has_several_frames(image) else "")
            _check_pixels(*image.size)
            if shrink_to is not None and image.format == "JPEG":
                # Both sides stay at or above shrink_to: draft() never goes below the size asked for.
                scale = shrink_to / min(image.size)
                image.draft("RGB", (round(image.width * scale), round(image.height * scale)))
            return _to_rgb(image, upright), mode
    except UnreadableImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        words = f"too many pixels: more than {limits.max_pixels / 1e6:,.0f} million"
        raise UnreadableImage(f"{words}; store a smaller copy, or raise --max-pixels") from None
    except UnidentifiedImageError:
        if data[4:8] == b"ftyp" and data[8:12] in HEIF_BRANDS and "HEIF" not in _formats():
            raise UnreadableImage("HEIC needs one package more: pip install 'millionway[heic]'") from None
        raise UnreadableImage(f"not an image in a format that is read ({', '.join(_formats())})") from None
    except Exception as error:  # each format's decoder has exceptions of its own
        raise UnreadableImage(str(error) or type(error).__name__) from None


def _has_several_frames(image: Image.Image) -> bool:
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception:  # a broken second frame says nothing about the first
        return False


def pixels_of(image: Image.Image) -> np.ndarray:
    """[height, width, 4] uint8, Pillow's own memory; the fourth value means nothing. Where it has none, [.., .., 3]."""
    try:
        memory = pa.array(image).flatten().buffers()[1]
    except (AttributeError, TypeError, ValueError):  # an image in several blocks of memory
        return np.asarray(image)
    return np.frombuffer(memory, np.uint8).reshape(image.height, image.width, 4)


def check_size(image: Image.Image, width: int, height: int) -> None:
    """Raises UnreadableImage unless the image has this size, or what decode() makes of it to save time."""
    if image.size not in [(-(-width // scale), -(-height // scale)) for scale in (1, 2, 4, 8)]:
        raise UnreadableImage(f"it changed: {image.width} x {image.height} pixels, indexed as {width} x {height}")


def is_near_empty(image: Image.Image) -> bool:
    """Whether almost nothing is to be seen: the brightness (0 to 255) deviates by less than NEAR_EMPTY."""
    # Green is most of the brightness, and a few pixels of it settle the matter for nearly all images.
    width, height = image.size
    some: Any = [image.getpixel((width * x // 8, height * y // 8)) for x, y in SOME_PLACES]
    greens = [pixel[1] for pixel in some]
    if max(greens) - min(greens) > 16 * NEAR_EMPTY:
        return False
    small = image.resize((64, 64), Image.Resampling.NEAREST).convert("L")
    return bool(np.asarray(small, dtype=np.float32).std() < NEAR_EMPTY)


def _to_rgb(image: Image.Image, upright: bool) -> Image.Image:
    image.load()
    image = _upright(image) if upright else image
    if image.mode in ("I;16", "I;16B", "I;16L", "I"):
        # Pillow would clip at 255. 16-bit gray keeps its upper byte.
        gray = np.asarray(image)
        gray = gray.clip(0, 65535) if image.mode == "I" else gray
        image = Image.fromarray((gray >> 8).astype(np.uint8))
    elif image.mode == "F":
        gray = np.nan_to_num(np.asarray(image))
        image = Image.fromarray((gray * (255 if gray.max(initial=0) <= 1 else 1)).clip(0, 255).astype(np.uint8))
    elif image.mode in ("LA", "PA", "RGBA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    if image.format != "TIFF" and not ROTATION_KEYS & image.info.keys():
        return image
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # a broken EXIF block says nothing about the pixels
        return image

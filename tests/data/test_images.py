"""Every kind of file that people have in their folders."""

import io

import numpy as np
import pytest
from PIL import Image

from millionway.data import images
from millionway.data.images import UnreadableImage, decode, decode_with_mode


def encoded(image: Image.Image, format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def photo(width: int = 40, height: int = 30) -> Image.Image:
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x * 255 // width, y * 255 // height, (x + y) * 255 // (width + height)], axis=2)
    return Image.fromarray(pixels.astype(np.uint8))


def pixels(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


@pytest.mark.parametrize("format", ["PNG", "BMP", "WEBP", "TIFF", "PPM"])
def test_lossless_formats_keep_the_pixels(format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    assert (pixels(decode(encoded(photo(), format, **options))) == pixels(photo())).all()


def test_cmyk_jpeg_keeps_its_colors() -> None:
    red = Image.new("RGB", (16, 16), (200, 30, 30))
    image = decode(encoded(red.convert("CMYK"), "JPEG", quality=95))
    assert abs(pixels(image) - (200, 30, 30)).max() < 25


def test_sixteen_bit_gray_is_scaled_not_clipped() -> None:
    gray = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    image = decode(encoded(Image.fromarray(gray), "PNG"))
    assert abs(pixels(image)[..., 0] - gray / 257).max() <= 1


def test_transparency_lies_over_white() -> None:
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert (pixels(decode(encoded(clear, "PNG"))) == 255).all()
    gray_alpha = Image.new("LA", (8, 8), (100, 255))
    assert (pixels(decode(encoded(gray_alpha, "PNG"))) == 100).all()
    palette = Image.new("P", (8, 8), 0)
    assert (pixels(decode(encoded(palette, "GIF", transparency=0))) == 255).all()


def test_exif_rotation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn right by 90 degrees to view
    turned = decode(encoded(photo(40, 30), "JPEG", exif=exif, quality=95))
    assert turned.size == (30, 40)
    upright = photo(40, 30).transpose(Image.Transpose.ROTATE_270)
    assert abs(pixels(turned) - pixels(upright)).mean() < 4


def test_broken_exif_does_not_matter() -> None:
    data = encoded(photo(), "JPEG", exif=b"Exif\0\0rubbish that is no TIFF header")
    assert decode(data).size == (40, 30)


def test_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (10, 10), color) for color in ((255, 0, 0), (0, 255, 0))]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_with_mode(data)[1] == "P of several" and decode_with_mode(encoded(frames[0], "GIF"))[1] == "P"
    assert decode_with_mode(encoded(frames[0], "TIFF", save_all=True, append_images=frames[1:]))[1] == "RGB of several"
    image = decode(data)
    assert (pixels(image)[0, 0] == (255, 0, 0)).all()


def test_one_pixel_is_an_image() -> None:
    assert decode(encoded(photo(1, 1), "PNG")).size == (1, 1)


def test_truncated_files_are_unreadable() -> None:
    for format in ("JPEG", "PNG"):
        noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
        data = encoded(noise, format)
        with pytest.raises(UnreadableImage, match=r".+"):
            decode(data[: len(data) // 2])


def test_rubbish_is_unreadable() -> None:
    with pytest.raises(UnreadableImage, match="empty"):
        decode(b"")
    with pytest.raises(UnreadableImage, match="not an image"):
        decode(b"hello, this is a text file")


def test_two_hundred_megapixels_are_refused_before_they_are_decoded() -> None:
    data = encoded(Image.new("1", (20_000, 10_000)), "PNG")
    assert len(data) < 10**6
    with pytest.raises(UnreadableImage, match="too many pixels"):
        decode(data)


def test_jpeg_is_decoded_smaller_where_that_is_enough() -> None:
    data = encoded(photo(800, 600), "JPEG", quality=95)
    small = decode(data, shrink_to=100)
    assert small.size == (200, 150)  # a quarter is the smallest scale that keeps 100 pixels
    assert decode(data, shrink_to=600).size == (800, 600)
    assert abs(pixels(small) - pixels(photo(800, 600).resize((200, 150), Image.Resampling.BOX))).mean() < 3


def test_photos_of_phones() -> None:
    """HEIC, by the extra package."""
    from pillow_heif import from_pillow

    buffer = io.BytesIO()
    from_pillow(photo(400, 300)).save(buffer, quality=90)
    image = decode(buffer.getvalue())
    assert image.size == (400, 300)
    assert abs(pixels(image) - pixels(photo(400, 300))).mean() < 4


def test_limits_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "limits", images.Limits(max_pixels=1199, max_bytes=10**6))
    with pytest.raises(UnreadableImage, match=r"too many pixels: 40 x 30, .* --max-pixels"):
        decode(encoded(photo(), "PNG"))
    images.limits.max_pixels = 1200
    assert decode(encoded(photo(), "PNG")).size == (40, 30)
    images.limits.max_bytes = 100
    with pytest.raises(UnreadableImage, match=r"too large: .* --max-image-bytes"):
        decode(encoded(photo(), "PNG"))


def test_sixteen_bits_keep_their_upper_byte() -> None:
    gray = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    for image in (Image.fromarray(gray), Image.fromarray(gray.astype(np.int32))):
        assert np.array_equal(pixels(decode(encoded(image, "TIFF")))[..., 0], gray >> 8)

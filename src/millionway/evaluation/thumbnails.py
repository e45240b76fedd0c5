"""Images as small pictures in a JSON file: what a page shows of them."""

import base64
import io
from typing import Any

from PIL import Image
from torch import Tensor

from millionway.data.dataset import Dataset
from millionway.data.images import UnreadableImage, decode

PIXELS = 256
ENLARGED = 160  # small images, so that each of their pixels is seen
SMALL = 64


def thumbnail(image: Image.Image) -> str:
    """base64 of a PNG for small images, else of a JPEG."""
    longest = max(image.size)
    scale = max(1, ENLARGED // longest) if longest <= SMALL else min(1.0, PIXELS / longest)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    nearest = Image.Resampling.NEAREST if longest <= SMALL else Image.Resampling.BILINEAR
    buffer = io.BytesIO()
    image.resize(size, nearest).save(buffer, "PNG" if longest <= SMALL else "JPEG")
    return base64.b64encode(buffer.getvalue()).decode()


def picture_of(dataset: Dataset, instance_id: int) -> dict[str, Any] | None:
    """An image of the data by its key; None for one that is gone by now."""
    try:
        image = decode(dataset.source.read(instance_id), PIXELS)
    except UnreadableImage:
        return None
    return {"instance_id": instance_id, "key": dataset.manifest.keys[instance_id], "picture": thumbnail(image)}


def picture_of_view(view: Tensor, key: str) -> dict[str, Any]:
    """view: [3, height, width], colors from 0 to 1."""
    pixels = (view.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    return {"key": key, "picture": thumbnail(Image.fromarray(pixels))}

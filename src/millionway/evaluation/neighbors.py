"""A few images and their nearest neighbors by features, with thumbnails: what the encoder finds alike."""

import base64
import io
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from millionway import randomness
from millionway.data.dataset import Dataset
from millionway.data.images import decode

NUM_QUERIES = 10
NUM_NEIGHBORS = 8
THUMBNAIL_PIXELS = 72


def neighbors(dataset: Dataset, instance_ids: Tensor, features: Tensor, seed: int) -> list[list[dict[str, Any]]]:
    """Rows of images: a query drawn by the seed, then its nearest ones, most similar first."""
    unit = F.normalize(features)
    order = torch.randperm(len(unit), generator=randomness.generator(seed, "neighbors"))
    rows = []
    for query in order[:NUM_QUERIES].tolist():
        cosines = unit @ unit[query]
        cosines[query] = torch.inf  # itself first
        nearest = cosines.topk(min(NUM_NEIGHBORS + 1, len(unit))).indices.tolist()
        rows.append([_entry(dataset, int(instance_ids[n]), float(cosines[n])) for n in nearest])
    return rows


def _entry(dataset: Dataset, instance_id: int, cosine: float) -> dict[str, Any]:
    labels = dataset.labels
    image = decode(dataset.source.read(instance_id), THUMBNAIL_PIXELS)
    resample = Image.Resampling.NEAREST if max(image.size) <= 32 else Image.Resampling.BILINEAR
    scale = THUMBNAIL_PIXELS / max(image.size)
    image = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), resample)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return {
        "instance_id": instance_id,
        "key": dataset.manifest.keys[instance_id],
        "label": labels.names[labels.ids[instance_id]] if labels and labels.ids[instance_id] >= 0 else None,
        "cosine": min(cosine, 1.0),
        "png": base64.b64encode(buffer.getvalue()).decode(),
    }

"""A few images and their nearest neighbors by features, with thumbnails: what the encoder finds alike."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from millionway.data.dataset import Dataset
from millionway.data.source import Labels
from millionway.evaluation.thumbnails import picture_of

NUM_QUERIES = 10
NUM_NEIGHBORS = 8


def neighbors(
    dataset: Dataset, instance_ids: Tensor, features: Tensor, labels: Labels | None
) -> list[list[dict[str, Any]]]:
    """Rows of images: each of the first few, then its nearest ones, most similar first."""
    unit = F.normalize(features)
    rows = []
    for query in range(min(NUM_QUERIES, len(unit))):
        cosines = unit @ unit[query]
        cosines[query] = torch.inf  # itself first
        nearest = cosines.topk(min(NUM_NEIGHBORS + 1, len(unit))).indices.tolist()
        entries = [_entry(dataset, int(instance_ids[n]), float(cosines[n]), labels) for n in nearest]
        if entries[0] is not None:
            rows.append([entry for entry in entries if entry is not None])
    return rows


def _entry(dataset: Dataset, instance_id: int, cosine: float, labels: Labels | None) -> dict[str, Any] | None:
    """None for an image that is gone by now."""
    picture = picture_of(dataset, instance_id)
    if picture is None:
        return None
    label = -1 if labels is None else int(labels.ids[instance_id])
    name = None if labels is None or label < 0 else labels.names[label]
    return {**picture, "label": name, "cosine": min(cosine, 1.0)}

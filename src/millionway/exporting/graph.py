"""The encoder as a graph that needs nobody's Python: from pixels to features, and how far another runtime is off."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from millionway.model.encoder import Encoder

MAX_SIDE = 16384
MAX_BATCH = 65536
CHECKED = (3, 5)  # batches: other numbers than the one that is traced


class Graph(nn.Module):
    """Takes colors from 0 to 1, [batch, 3, size, size]; with `from_bytes` RGB bytes, [batch, height, width, 3].

    Bytes go the way of millionway's own images: the central square (above 64 px its middle 7/8), resized with a
    triangle filter. Both are matrix products, which every runtime has, with numbers that follow from height and width.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: Encoder, from_bytes: bool) -> None:
        super().__init__()
        self.backbone, self.size, self.from_bytes = encoder.backbone, encoder.spec.image_size, from_bytes
        self.register_buffer("mean", encoder.mean.clone())
        self.register_buffer("std", encoder.std.clone())
        self.cpu().to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]

    def forward(self, images: Tensor) -> Tensor:
        if self.from_bytes:
            height, width = images.shape[1], images.shape[2]
            side = torch.sym_min(height, width)
            if self.size > 64:
                side = (7 * side + 3 + (7 * side // 8) % 2) // 8  # 7/8 of it, halves to the even number
            rows = _resize(height, side, self.size)
            columns = _resize(width, side, self.size) / 255
            images = rows @ (images.permute(0, 3, 1, 2).float() @ columns.T)
        return self.backbone((images - self.mean) / self.std)


def _resize(num_in: Any, side: Any, num_out: int) -> Tensor:
    """[num_out, num_in]: a triangle filter on the middle `side` of num_in pixels; wider when it shrinks."""
    start = (num_in - side) // 2
    scale = side / num_out
    places = torch.arange(num_in) + 0.5
    centers = start + (torch.arange(num_out) + 0.5) * scale
    weights = (1 - (places - centers[:, None]).abs() / torch.sym_max(scale, 1.0)).clamp(min=0)
    weights = weights * ((places >= start) & (places <= start + side))
    return weights / weights.sum(dim=1, keepdim=True)


def example(graph: Graph, num: int = 2, height: int = 90, width: int = 120) -> Tensor:
    """Real pixels: parts of the photo of a flower that comes with scikit-learn."""
    from sklearn.datasets import load_sample_image

    photo = torch.from_numpy(load_sample_image("flower.jpg").copy())  # [427, 640, 3]
    if not graph.from_bytes:
        height = width = graph.size
    places = [(17 * n % (photo.shape[0] - min(height, 300)), 61 * n % 300) for n in range(num)]
    parts = torch.stack([_part(photo, top, left, height, width) for top, left in places])
    return parts if graph.from_bytes else parts.permute(0, 3, 1, 2) / 255


def _part(photo: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """Of this size, however large; the photo goes on at its other edge."""
    rows = (top + torch.arange(height)) % photo.shape[0]
    columns = (left + torch.arange(width)) % photo.shape[1]
    return photo[rows][:, columns]


def shapes(graph: Graph) -> dict[str, dict[int, Any]]:
    """What may be of any size."""
    from torch.export import Dim

    free: dict[int, Any] = {0: Dim("batch", max=MAX_BATCH)}
    if graph.from_bytes:
        free |= {1: Dim("height", min=8, max=MAX_SIDE), 2: Dim("width", min=8, max=MAX_SIDE)}
    return {"images": free}


@torch.no_grad()
def difference(graph: Graph, other: Callable[[Tensor], Tensor]) -> float:
    """The largest difference of a feature from torch's own, as a share of the largest feature, on parts of a photo."""
    most = 0.0
    for num, (height, width) in zip(CHECKED, ((131, 70), (64, 200))):
        images = example(graph, num, height, width)
        expected = graph(images)
        most = max(most, float((other(images) - expected).abs().max() / expected.abs().max().clamp(min=1e-12)))
    return most

"""Pictures that can be told apart, and where they are served."""

import io
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

NUM = 400


def picture(number: int) -> Image.Image:
    draw = np.random.default_rng(number // 2 if number < 10 else number)  # the first ten are five pairs
    return Image.fromarray(draw.integers(0, 256, (7, 7, 3), dtype=np.uint8)).resize((64, 48), Image.Resampling.BICUBIC)


def encoded(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def vector(image: Image.Image) -> torch.Tensor:
    small = np.asarray(image.convert("RGB").resize((7, 7), Image.Resampling.BOX), np.float32)
    return F.normalize(torch.from_numpy(small).flatten() - 128, dim=0)


@dataclass(frozen=True)
class Served:
    address: str
    port: int
    token: str

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

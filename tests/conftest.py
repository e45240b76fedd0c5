"""Shapes in signatures are checked here, and only here."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook
from PIL import Image

os.environ.setdefault("MPLBACKEND", "agg")
settings.register_profile("ours", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("ours")

with install_import_hook(
    ["millionway.model", "millionway.data.views", "millionway.evaluation", "millionway.train.step"], "beartype.beartype"
):
    import millionway.data.views
    import millionway.evaluation.health
    import millionway.evaluation.linear
    import millionway.evaluation.protocols
    import millionway.model.classifier
    import millionway.model.prior
    import millionway.train.step  # noqa: F401


@pytest.fixture(scope="session")
def digit_pixels() -> np.ndarray:
    """scikit-learn's digits as [1797, 8, 8] uint8, and their labels."""
    from millionway.data.sources import open_source

    source = open_source("digits")
    return source.pixels  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(scope="session")
def digit_folder(tmp_path_factory: pytest.TempPathFactory, digit_pixels: np.ndarray) -> Path:
    """120 real digits as PNG files of 16 px, in folders by their label."""
    from millionway.data.sources import open_source

    labels = open_source("digits").labels
    assert labels is not None
    root = tmp_path_factory.mktemp("digits")
    for index in range(120):
        folder = root / labels.names[labels.ids[index]]
        folder.mkdir(exist_ok=True)
        Image.fromarray(digit_pixels[index]).resize((16, 16)).save(folder / f"{index:03d}.png")
    return root

"""Shapes in signatures are checked here, and only here."""

import os
import subprocess
from collections.abc import Callable, Iterator
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
    from millionway.data.kinds.choose import open_source

    source = open_source("digits")
    return source.pixels  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(scope="session")
def digit_folder(tmp_path_factory: pytest.TempPathFactory, digit_pixels: np.ndarray) -> Path:
    """120 real digits as PNG files of 16 px, in folders by their label."""
    from millionway.data.kinds.choose import open_source

    labels = open_source("digits").labels
    assert labels is not None
    root = tmp_path_factory.mktemp("digits")
    for index in range(120):
        folder = root / labels.names[labels.ids[index]]
        folder.mkdir(exist_ok=True)
        Image.fromarray(digit_pixels[index]).resize((16, 16)).save(folder / f"{index:03d}.png")
    return root


@pytest.fixture
def disk_of(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A real file system of a given size, for example "8m"; the test is skipped where none can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounts = []

    def mount(size: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
        mounts.append(disk)
        return disk

    yield mount
    for mounted in mounts:
        subprocess.run(["umount", str(mounted)], check=True)

"""The method in one file: short enough to read, and it learns."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "minimal.py"


def test_it_is_short_and_needs_only_the_classifier() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 120
    assert re.findall(r"(?:from|import) (millionway\S*)", text) == ["millionway.model.classifier"]


def test_it_learns_from_digits() -> None:
    command = [sys.executable, str(EXAMPLE), "--epochs", "3"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    before, after = (float(value) for value in re.findall(r"k-NN accuracy \w+: ([\d.]+)%", text))
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", text)]
    assert after > before and losses[-1] < losses[0]

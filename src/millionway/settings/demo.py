"""What can be set for the demo."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from millionway.settings.checks import Chosen, Positive


@dataclass(frozen=True)
class Demo:
    """Pretrain on 1,797 handwritten digits and score the encoder: the whole path in about two minutes."""

    out: Path = Path("runs/demo")
    """the run folder to make; a number is added if it exists"""
    _: KW_ONLY
    seed: int = 1
    """everything random follows from it"""
    epochs: Chosen[Positive[int]] = None
    """passes over all images; by default the preset's"""

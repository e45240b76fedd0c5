"""What is run to compare instance classification with its peers: the methods with the values chosen for them, and what
was tried for that on seed 0 of CIFAR-10."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer_methods import PEERS, Values

from millionway.settings.presets import preset
from millionway.settings.pretrain import EncoderPrecision, Pretrain, with_settings

RESULTS = Path(__file__).parent / "results" / "peers"
OURS = "ours"
PRESETS = {"cifar10": "cifar10-small", "fashion-mnist": "fashion-mnist-small", "icons": "cifar10-small"}
PRESETS |= {"other-icons": "cifar10-small"}
SETTINGS: dict[str, dict[str, Any]] = {name: {"image_size": 64, "stem": "auto"} for name in ("icons", "other-icons")}
"""of a set that has no preset of its own"""


@dataclass(frozen=True)
class Cell:
    method: str
    values: dict[str, Any] = field(default_factory=dict)
    """what differs from the method's own values: settings of a run for ours, `Values` for a peer"""
    seed: int = 0
    images: int = 10_000
    epochs: int = 10
    set: str = "cifar10"
    precision: EncoderPrecision = "float32"
    """of the encoder, ours or a peer's"""

    @property
    def name(self) -> str:
        values = [f"{name}={value}" for name, value in sorted(self.values.items())]
        return "_".join([self.method.replace(" ", "-"), *values, f"e{self.epochs}", f"s{self.seed}"])

    @property
    def folder(self) -> str:
        """What is compared with each other."""
        return f"{self.set}_{self.images}" + ("_bfloat16" if self.precision == "bfloat16" else "")

    @property
    def result(self) -> Path:
        return RESULTS / self.folder / f"{self.name}.json"

    @property
    def cost(self) -> Path:
        """What an epoch of each method takes on these images."""
        return RESULTS / f"cost_{self.folder}.json"

    @property
    def config(self) -> Pretrain:
        """A peer has the images, encoder and views of the preset, and its own batches."""
        values = self.values
        if self.method != OURS:
            values = {"views": 2, "batch_size": self.peer_values.batch_size, "first_size": "full"}
        values = {**SETTINGS.get(self.set, {}), "encoder_precision": self.precision, **values}
        return with_settings(preset(PRESETS[self.set]), seed=self.seed, epochs=self.epochs, **values)

    @property
    def peer_values(self) -> Values:
        return Values(**self.values)


# As simclr.py chose them from 13; for MoCo until its own tuning is done.
CONTRASTIVE = {"lr": 0.06, "temperature": 0.1, "batch_size": 64, "head": "linear"}
CONTRASTIVE |= {"weight_decay": 1e-4, "warmup_epochs": 1}
ONE_VIEW = {"views": 1, "warmup_epochs": 1, "optimizer": "sgd", "lr": 0.06, "row_lr": 10.0}
MUON = {**ONE_VIEW, "optimizer": "muon", "lr": 0.02, "row_lr": 30.0}
PAIRS = {"views": 2, "warmup_epochs": 1, "optimizer": "muon", "lr": 0.03, "row_lr": 40.0, "pairs": 3.0}

MANY_PAIRS = {**PAIRS, "batch_size": 128, "lr": 0.04, "row_lr": 60.0, "dim": 64}

METHODS: dict[str, Cell] = {
    "ours": Cell(OURS, PAIRS),
    "ours, many images": Cell(OURS, MANY_PAIRS),
    "ours, one view": Cell(OURS, MUON),
    "ours, one view, SGD": Cell(OURS, ONE_VIEW),
    "SimCLR": Cell("SimCLR", CONTRASTIVE),
    "MoCo v2": Cell("MoCo v2", CONTRASTIVE),
    "SimCLR, Muon": Cell("SimCLR", {**CONTRASTIVE, "optimizer": "muon", "lr": 0.03}),
    **{name: Cell(name) for name in PEERS if name not in ("SimCLR", "MoCo v2")},
}

OURS_TRIED: list[dict[str, Any]] = [
    PAIRS,
    {**PAIRS, "row_views": 2},
    {**PAIRS, "dim": 64},
    {**PAIRS, "batch_size": 128, "row_lr": 80.0},
    {**PAIRS, "batch_size": 128, "row_lr": 60.0, "lr": 0.04},
    {**PAIRS, "temperature": 0.15},
    {**PAIRS, "crop_min": 0.2},
    {**PAIRS, "pairs": 1.0},
    {**PAIRS, "lr": 0.045, "row_lr": 27.0},
]
MANY_TRIED = [{**PAIRS, "batch_size": 64, "dim": 128}, MANY_PAIRS, {**MANY_PAIRS, "dim": 128}]
SIZES_TRIED: list[tuple[dict[str, Any], int]] = [
    ({**PAIRS, "first_size": "full"}, 5),
    ({**PAIRS, "first_size": 48}, 7),
    ({**PAIRS, "first_size": 32}, 9),
]
"""on icons of other sets than those of the comparison, with the epochs that take about as long"""
PEERS_TRIED: list[dict[str, Any]] = [
    CONTRASTIVE,
    {**CONTRASTIVE, "batch_size": 32},
    {**CONTRASTIVE, "temperature": 0.2},
    {**CONTRASTIVE, "temperature": 0.07},
    {**CONTRASTIVE, "lr": 0.12},
    {**CONTRASTIVE, "lr": 0.03},
    {**CONTRASTIVE, "head": "lightly"},
    {**CONTRASTIVE, "batch_size": 128, "lr": 0.12},
    {},
]
TUNING = [Cell(OURS, values, epochs=8, precision="bfloat16") for values in OURS_TRIED]
TUNING += [Cell("SimCLR", values, epochs=10, precision="bfloat16") for values in PEERS_TRIED]
TUNING += [Cell(OURS, values, images=50_000, epochs=3, precision="bfloat16") for values in MANY_TRIED]
TUNING += [Cell("MoCo v2", values, epochs=14, precision="bfloat16") for values in PEERS_TRIED]
TUNING += [Cell(OURS, values, epochs=num, set="other-icons", precision="bfloat16") for values, num in SIZES_TRIED]
TUNING += [Cell(OURS, {**PAIRS, "first_size": 24}, epochs=10, precision="bfloat16")]

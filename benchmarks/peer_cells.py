"""What is run to compare instance classification with its peers: the methods with the values chosen for them, and what
was tried for that on seed 0 of CIFAR-10."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer_methods import PEERS, Values

from millionway.settings.presets import preset
from millionway.settings.pretrain import Pretrain, with_settings

RESULTS = Path(__file__).parent / "results" / "peers"
OURS = "ours"
PRESETS = {"cifar10": "cifar10-small", "fashion-mnist": "fashion-mnist-small"}


@dataclass(frozen=True)
class Cell:
    method: str
    values: dict[str, Any] = field(default_factory=dict)
    """what differs from the method's own values: settings of a run for ours, `Values` for a peer"""
    seed: int = 0
    images: int = 10_000
    epochs: int = 10
    set: str = "cifar10"

    @property
    def name(self) -> str:
        values = [f"{name}={value}" for name, value in sorted(self.values.items())]
        return "_".join([self.method.replace(" ", "-"), *values, f"e{self.epochs}", f"s{self.seed}"])

    @property
    def result(self) -> Path:
        return RESULTS / f"{self.set}_{self.images}" / f"{self.name}.json"

    @property
    def config(self) -> Pretrain:
        """A peer has the images, encoder and views of the preset, and its own batches."""
        values = self.values if self.method == OURS else {"views": 2, "batch_size": self.peer_values.batch_size}
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

METHODS: dict[str, Cell] = {
    "ours": Cell(OURS, PAIRS),
    "ours, one view": Cell(OURS, MUON),
    "ours, one view, SGD": Cell(OURS, ONE_VIEW),
    "SimCLR": Cell("SimCLR", CONTRASTIVE),
    "MoCo v2": Cell("MoCo v2", CONTRASTIVE),
    "SimCLR, Muon": Cell("SimCLR", {**CONTRASTIVE, "optimizer": "muon", "lr": 0.03}),
    **{name: Cell(name) for name in PEERS if name not in ("SimCLR", "MoCo v2")},
}

OURS_TRIED: list[dict[str, Any]] = [
    ONE_VIEW,
    MUON,
    {**MUON, "batch_size": 128, "lr": 0.03, "row_lr": 40.0},
    {**MUON, "lr": 0.04, "row_lr": 15.0},
    {**MUON, "lr": 0.01, "row_lr": 60.0},
    {**MUON, "dim": 64},
    {**MUON, "crop_min": 0.2},
    {**MUON, "row_lr": 60.0},
    {**MUON, "row_lr": 15.0},
    {**MUON, "temperature": 0.15},
    {**MUON, "warmup_epochs": 0},
    {**MUON, "head": "mlp"},
    {**MUON, "weight_decay": 1e-2},
]
PEERS_TRIED: list[dict[str, Any]] = [
    CONTRASTIVE,
    {**CONTRASTIVE, "batch_size": 32},
    {**CONTRASTIVE, "temperature": 0.2},
    {**CONTRASTIVE, "temperature": 0.07},
    {**CONTRASTIVE, "lr": 0.12},
    {**CONTRASTIVE, "lr": 0.03},
    {**CONTRASTIVE, "head": "lightly"},
    {**CONTRASTIVE, "weight_decay": 5e-4},
    {**CONTRASTIVE, "batch_size": 128, "lr": 0.12},
    {**CONTRASTIVE, "warmup_epochs": 0},
    {**CONTRASTIVE, "optimizer": "muon", "lr": 0.02},
    {**CONTRASTIVE, "optimizer": "muon", "lr": 0.02, "batch_size": 32},
    {},
]
TUNING = [Cell(OURS, values, epochs=10) for values in OURS_TRIED]
TUNING += [Cell(name, values, epochs=5) for values in PEERS_TRIED for name in ("SimCLR", "MoCo v2")]

"""The peers' methods by lightly's own losses and heads, with the values of its CIFAR-10 benchmark.

A method is one function, encoder -> Peer; `step` is the same for all of them.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from lightly.loss import BarlowTwinsLoss, DINOLoss, NegativeCosineSimilarity, NTXentLoss, SwaVLoss
from lightly.models.modules import heads
from lightly.models.utils import deactivate_requires_grad, update_momentum
from torch import Tensor, nn

from millionway.model.encoder import Encoder
from millionway.settings.pretrain import EncoderPrecision
from millionway.train.setup import build_optimizer

TEACHER_MOMENTUM = 0.99


@dataclass(frozen=True)
class Values:
    """What can be tuned. The defaults are lightly's; a temperature of None is the method's own."""

    lr: float = 0.06
    optimizer: Literal["sgd", "muon"] = "sgd"
    """or muon, as ours has it"""
    batch_size: int = 128
    """images; each gives two views"""
    temperature: float | None = None
    weight_decay: float = 5e-4
    warmup_epochs: float = 0
    head: str = "lightly"
    """or linear: one Linear to 128, where the loss is NT-Xent"""
    queue: int = 4096
    """negatives that MoCo remembers"""
    views: Literal["ours", "lightly"] = "ours"
    """who makes them: lightly by the transform of its SimCLR"""


def in_float32(criterion: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss itself, whatever the networks compute in, as ours is."""

    def computed(*outputs: Tensor | list[Tensor]) -> Tensor:
        exact = [[each.float() for each in o] if isinstance(o, list) else o.float() for o in outputs]
        with torch.autocast("cpu", enabled=False):
            return criterion(*exact)

    return computed


@dataclass
class Peer:
    """A method around an encoder."""

    loss: Callable[[Tensor, Tensor], Tensor]
    """of the two views of a batch"""
    trained: list[nn.Module]
    teachers: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)
    """(a trained module, its running mean)"""
    optimizer: torch.optim.Optimizer = field(init=False)
    precision: EncoderPrecision = "float32"

    def step(self, first: Tensor, second: Tensor, lr: float) -> Tensor:
        for module, teacher in self.teachers:
            update_momentum(module, teacher, m=TEACHER_MOMENTUM)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = lr
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bfloat16"):
            loss = self.loss(first, second)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def teacher_of(module: nn.Module) -> nn.Module:
    teacher = copy.deepcopy(module)
    deactivate_requires_grad(teacher)
    return teacher


def contrastive_head(encoder: Encoder, values: Values, kind: type[nn.Module]) -> nn.Module:
    width = encoder.feature_dim
    return nn.Linear(width, 128) if values.head == "linear" else kind(width, width, 128)


def simclr(encoder: Encoder, values: Values) -> Peer:
    head = contrastive_head(encoder, values, heads.SimCLRProjectionHead)
    criterion = in_float32(NTXentLoss(temperature=values.temperature or 0.5))

    def loss(first: Tensor, second: Tensor) -> Tensor:
        both = head(encoder(torch.cat([first, second])))
        return criterion(*both.chunk(2))

    return Peer(loss, [encoder, head])


def moco(encoder: Encoder, values: Values) -> Peer:
    """MoCo v2: the first view asks, the second is encoded by the running mean and remembered."""
    student = nn.Sequential(encoder, contrastive_head(encoder, values, heads.MoCoProjectionHead))
    teacher = teacher_of(student)
    bank = NTXentLoss(temperature=values.temperature or 0.1, memory_bank_size=(values.queue, 128))
    criterion = in_float32(bank)

    def loss(first: Tensor, second: Tensor) -> Tensor:
        with torch.no_grad():
            keys = teacher(second)
        return criterion(student(first), keys)

    return Peer(loss, [student], [(student, teacher)])


def byol(encoder: Encoder, values: Values) -> Peer:
    student = nn.Sequential(encoder, heads.BYOLProjectionHead(encoder.feature_dim, 1024, 256))
    predictor = heads.BYOLPredictionHead(256, 1024, 256)
    teacher = teacher_of(student)
    criterion = in_float32(NegativeCosineSimilarity())

    def loss(first: Tensor, second: Tensor) -> Tensor:
        with torch.no_grad():
            targets = [teacher(first), teacher(second)]
        predictions = [predictor(student(first)), predictor(student(second))]
        return 0.5 * (criterion(predictions[0], targets[1]) + criterion(predictions[1], targets[0]))

    return Peer(loss, [student, predictor], [(student, teacher)])


def simsiam(encoder: Encoder, values: Values) -> Peer:
    projection = heads.SimSiamProjectionHead(encoder.feature_dim, 2048, 2048)
    predictor = heads.SimSiamPredictionHead(2048, 512, 2048)
    criterion = in_float32(NegativeCosineSimilarity())

    def loss(first: Tensor, second: Tensor) -> Tensor:
        z = [projection(encoder(first)), projection(encoder(second))]
        p = [predictor(each) for each in z]
        return 0.5 * (criterion(p[0], z[1].detach()) + criterion(p[1], z[0].detach()))

    return Peer(loss, [encoder, projection, predictor])


def barlow_twins(encoder: Encoder, values: Values) -> Peer:
    projection = heads.BarlowTwinsProjectionHead(encoder.feature_dim, 2048, 2048)
    criterion = in_float32(BarlowTwinsLoss())

    def loss(first: Tensor, second: Tensor) -> Tensor:
        return criterion(projection(encoder(first)), projection(encoder(second)))

    return Peer(loss, [encoder, projection])


def dino(encoder: Encoder, values: Values) -> Peer:
    head, teacher_head = (
        heads.DINOProjectionHead(encoder.feature_dim, 2048, 256, 2048, batch_norm=True) for _ in range(2)
    )
    deactivate_requires_grad(teacher_head)  # its last layer cannot be copied; it follows from its own start
    teacher = teacher_of(encoder)
    criterion = in_float32(DINOLoss(output_dim=2048))

    def loss(first: Tensor, second: Tensor) -> Tensor:
        with torch.no_grad():
            targets = [teacher_head(teacher(view)) for view in (first, second)]
        return criterion(targets, [head(encoder(view)) for view in (first, second)])

    return Peer(loss, [encoder, head], [(encoder, teacher), (head, teacher_head)])


def swav(encoder: Encoder, values: Values) -> Peer:
    projection = heads.SwaVProjectionHead(encoder.feature_dim, encoder.feature_dim, 128)
    prototypes = heads.SwaVPrototypes(128, 512)
    criterion = in_float32(SwaVLoss(temperature=values.temperature or 0.1))

    def loss(first: Tensor, second: Tensor) -> Tensor:
        prototypes.normalize()
        both = nn.functional.normalize(projection(encoder(torch.cat([first, second]))))
        return criterion([prototypes(each) for each in both.chunk(2)], []).squeeze()

    return Peer(loss, [encoder, projection, prototypes])


PEERS: dict[str, Callable[[Encoder, Values], Peer]] = {
    "SimCLR": simclr,
    "MoCo v2": moco,
    "BYOL": byol,
    "SimSiam": simsiam,
    "Barlow Twins": barlow_twins,
    "DINO": dino,
    "SwAV": swav,
}


def build_peer(name: str, encoder: Encoder, values: Values, precision: EncoderPrecision = "float32") -> Peer:
    peer = PEERS[name](encoder, values)
    peer.precision = precision
    parameters = [p for module in peer.trained for p in module.parameters() if p.requires_grad]
    peer.optimizer = build_optimizer(values.optimizer, parameters, values.lr, 0.9, values.weight_decay, precision)
    return peer

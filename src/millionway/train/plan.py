"""Will it fit, and what travels? Memory and communication of a run, before it is started."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from millionway.machine import has_bfloat16
from millionway.model import threads
from millionway.model.classifier import InstanceClassifier
from millionway.model.encoder import EncoderSpec, build_encoder, full_name
from millionway.model.hardest import search_bytes
from millionway.model.head import build_head
from millionway.model.network import Network
from millionway.model.rows import NUM_RUNS, rows_per_block
from millionway.parallel.layout import local_range
from millionway.settings.plan import Plan
from millionway.settings.pretrain import EncoderPrecision, Pretrain, with_settings
from millionway.settings.resolve import Facts, resolve
from millionway.train import limits

FLOAT = 4
TFLOPS = {"cuda": 10.0, "mps": 2.0, "cpu": 0.05}
"""float32 products, a cautious guess for the search where nothing is measured"""
PASSING = ("activations", "views")
"""of the encoder's memory: only during a step"""
ENCODER_GRADIENTS = "encoder gradients (DDP)"


@dataclass
class Answer:
    """Bytes on each device, and per step through its network."""

    memory: dict[str, int]
    communication: dict[str, int]
    largest_instances: int | None = None
    """that fit into the device's memory"""
    seconds: dict[str, float] = field(default_factory=dict)
    """of a step, if measured"""
    hardest_seconds: float | None = None
    """of the search for the hardest classes, once per epoch: measured, or estimated from its products"""
    work: limits.Work | None = None
    """of the classifier in a step, if asked for"""
    bounds: list[limits.Bound] = field(default_factory=list)
    """by kind of GPU"""

    @property
    def total(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Question:
    """What is planned: a run's settings, and what it runs on."""

    instances: int
    config: Pretrain
    """resolved: every setting has a value"""
    devices: int
    device: str
    """cpu, cuda or mps"""
    device_memory: int | None = None

    @staticmethod
    def of(
        asked: Plan, instances: int, image_side: int | None, device: str, threads: int, bfloat16: bool = True
    ) -> "Question":
        """Where nothing is asked for, pretrain's own defaults. bfloat16: whether the device has instructions for it."""
        names = (
            "epochs",
            "dim",
            "batch_size",
            "image_size",
            "first_size",
            "hardest",
            "storage",
            "views",
            "micro_batch",
        )
        config = with_settings(
            Pretrain(data=asked.data or "", out=Path()),
            **{name: getattr(asked, name) for name in names},
            encoder=None if asked.encoder is None else full_name(asked.encoder),
        )
        facts = Facts(instances, image_side, device != "cpu", bfloat16, num_cores=threads, num_ranks=asked.devices)
        return Question(instances, resolve(config, facts), asked.devices, device, asked.device_memory)

    @property
    def batch_size(self) -> int:
        assert self.config.training.batch_size
        return self.config.training.batch_size

    @property
    def views(self) -> int:
        return self.config.augmentation.views

    @property
    def row_views(self) -> int:
        return self.config.classifier.row_views or self.views

    @property
    def storage(self) -> str:
        return self.config.classifier.storage

    @property
    def image_size(self) -> int:
        assert self.config.images.image_size
        return self.config.images.image_size

    @property
    def hardest(self) -> int:
        return self.config.classifier.hardest or 0

    @property
    def dim(self) -> int:
        assert self.config.model.dim
        return self.config.model.dim


def plan(asked: Plan) -> dict[str, Answer]:
    """`hybrid`: rows split over the devices, as here. `replicated`: all rows on each, by autograd and DDP."""
    if asked.instances is None:
        raise ValueError("give --data, your images, or --instances, their number")
    device = "cuda" if asked.device == "auto" else asked.device
    bfloat16 = device == "cuda" or has_bfloat16(torch.device(device))  # of a GPU that need not be here
    question = Question.of(asked, asked.instances, None, device, asked.threads or torch.get_num_threads(), bfloat16)
    answers = answers_to(question, asked.limits)
    if asked.calibrate:
        calibrate(question, answers["hybrid"])
    return answers


def answers_to(question: Question, with_limits: bool = False) -> dict[str, Answer]:
    """with_limits: also what bounds a step of the classifier on known GPUs."""
    network = _encoder_memory(question)
    hybrid = functools.partial(_hybrid_rows, beside=sum(network[name] for name in PASSING))
    answers = {
        "hybrid": Answer({**network, **hybrid(question, question.instances)}, _hybrid_words(question, network)),
        "replicated": Answer(
            {**network, **_replicated_rows(question, question.instances)}, _replicated_words(question, network)
        ),
    }
    if question.device_memory is not None:
        for name, rows in (("hybrid", hybrid), ("replicated", _replicated_rows)):
            answers[name].largest_instances = _largest(question, sum(network.values()), rows)
    if question.hardest:
        answers["hybrid"].hardest_seconds = _products(question) / TFLOPS[question.device] / 1e12
    if with_limits:
        words = sum(sent for what, sent in answers["hybrid"].communication.items() if what != ENCODER_GRADIENTS)
        answers["hybrid"].work = work = limits.work_of(question, words)
        answers["hybrid"].bounds = list(limits.bounds(work, question.devices))
    return answers


def calibrate(question: Question, answer: Answer) -> None:
    """Measure on the present device what was estimated."""
    answer.seconds = _measure(question)
    if question.hardest:
        answer.hardest_seconds = measure_hardest(question)


def _products(question: Question) -> float:
    """Floating-point operations of a device's search: its rows with all, its own among themselves only half."""
    own = local_range(question.instances, 0, question.devices)[1]
    return 2.0 * question.dim * own * (question.instances - own / 2)


def measure_hardest(question: Question) -> float:
    """A search among fewer rows on this device, scaled by its products."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    some = min(question.instances, max(8192, 16 * question.hardest))
    classifier = InstanceClassifier(some, question.dim, device=device)
    small = replace(question, instances=some, devices=1)
    seconds = _median_seconds(lambda: classifier.hardest(min(question.hardest, some - 1)), device)
    return seconds * _products(question) / _products(small)


class NetworkFacts(NamedTuple):
    num_parameters: int
    feature_dim: int
    kept_bytes: int
    """of a view, from forward to backward"""
    largest_bytes: int
    """the largest tensor among them"""


def facts_of(question: Question) -> NetworkFacts:
    return _facts_of(*_description(question))


@functools.lru_cache(maxsize=4)
def _facts_of(spec: EncoderSpec, head: str, dim: int) -> NetworkFacts:
    """By building the network and watching what a forward pass keeps for the backward."""
    network, some = _build(spec, head, dim), 2
    kept, largest = _kept_for_backward(network, torch.zeros(some, 3, spec.image_size, spec.image_size))
    num_parameters = sum(each.numel() for each in network.parameters())
    return NetworkFacts(num_parameters, network.encoder.feature_dim, kept // some, largest // some)


def _description(question: Question) -> tuple[EncoderSpec, str, int]:
    model, images = question.config.model, question.config.images
    assert model.encoder and model.head and model.stem != "auto"
    spec = EncoderSpec(model.encoder, model.stem, question.image_size, images.mean, images.std)
    return spec, model.head, question.dim


def _build(spec: EncoderSpec, head: str, dim: int, precision: EncoderPrecision = "float32") -> Network:
    encoder = build_encoder(spec, 0)
    return Network(encoder, build_head(head, encoder.feature_dim, dim, 0), precision)


def _encoder_memory(question: Question) -> dict[str, int]:
    network = facts_of(question)
    views = question.views * question.batch_size // question.devices
    at_once = min(views, (question.config.training.micro_batch or views) * question.views)
    half = 2 if question.config.model.encoder_precision == "bfloat16" else 1  # that is what is kept then
    pixels = 3 * question.image_size**2 * FLOAT
    return {
        "encoder: weights, gradients, momentum": 3 * network.num_parameters * FLOAT,
        "encoder: gradients under way": network.num_parameters * FLOAT if question.devices > 1 else 0,
        "activations": (network.kept_bytes + 2 * network.largest_bytes) * at_once // half,
        "views": 3 * views * pixels,
    }


def _kept_for_backward(network: nn.Module, images: torch.Tensor) -> tuple[int, int]:
    """(bytes of all tensors kept, of the largest one)"""
    known = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = network(images)
    sizes = [storage.nbytes() for storage in kept.values()]
    del output
    return sum(sizes), max(sizes, default=0)


def _hybrid_rows(question: Question, instances: int, beside: int) -> dict[str, int]:
    """What the rows of a device take, and a step with them. beside: what the encoder takes during a step."""
    batch, dim, k = question.row_views * question.batch_size, question.dim, question.hardest
    own = local_range(instances, 0, question.devices)[1]
    stored = own * dim * getattr(torch, question.storage).itemsize
    device = torch.device(question.device)
    block = min(own, rows_per_block(batch, device))
    copies = 4 if question.storage == "bfloat16" else 2  # of a block's rows
    targets = batch * (k + 1)
    table = own * k * FLOAT
    step = {
        "blocks": threads.num_workers(device) * block * (batch + copies * dim) * FLOAT,
        "embeddings of all devices": 8 * batch * dim * FLOAT + NUM_RUNS * batch * dim * FLOAT,
        "targets": targets * (5 * 8 + 4 * FLOAT),
    }
    search = search_bytes(own, instances, dim, k, device) if k else 0
    return {
        "rows": stored,
        "their momentum": stored,
        "lengths and marks of rows": own * (FLOAT + 1),
        "hardest classes": table,
        # Once per epoch, when nothing of a step is there.
        "search for the hardest classes, beyond a step": max(0, search - sum(step.values()) - beside),
        # Written beside the training. From other devices it goes to the memory of their machine.
        "copy for a checkpoint": 2 * stored + table if question.device == "cpu" else 0,
        **step,
    }


def _replicated_rows(question: Question, instances: int) -> dict[str, int]:
    """By autograd: also unit rows, and a gradient of everything; and DDP's buckets."""
    batch = question.row_views * question.batch_size // question.devices
    rows = instances * question.dim * FLOAT
    return {
        "rows": rows,
        "their momentum": rows,
        "their gradient": rows,
        "unit rows and their gradient": 2 * rows,
        "rows' gradient under way": rows if question.devices > 1 else 0,
        "logits, probabilities, their gradient": 3 * batch * instances * FLOAT,
        "hardest classes": instances * question.hardest * FLOAT,
    }


def _around(devices: int, num_bytes: int) -> int:
    """What a device sends when that much is gathered, or scattered, over a ring."""
    return num_bytes * (devices - 1) // devices


def _hybrid_words(question: Question, network: dict[str, int]) -> dict[str, int]:
    batch, devices = question.row_views * question.batch_size, question.devices
    gradients = network["encoder: weights, gradients, momentum"] // 3
    all_views = question.views * question.batch_size if question.config.classifier.pairs else 0
    return {
        "embeddings and ids (all_gather)": _around(devices, batch * (question.dim * FLOAT + 8)),
        "pairs (all_gather, reduce_scatter)": _around(devices, all_views * (2 * question.dim * FLOAT + 8)),
        "hardest classes (all_reduce)": 2 * _around(devices, batch * question.hardest * FLOAT),
        "Z and numerators (all_reduce)": 2 * _around(devices, 2 * batch * FLOAT),
        "embedding gradients (reduce_scatter)": _around(devices, batch * question.dim * FLOAT),
        ENCODER_GRADIENTS: 2 * _around(devices, gradients),
    }


def _replicated_words(question: Question, network: dict[str, int]) -> dict[str, int]:
    gradients = network["encoder: weights, gradients, momentum"] // 3
    rows = question.instances * question.dim * FLOAT
    return {
        ENCODER_GRADIENTS: 2 * _around(question.devices, gradients),
        "rows' gradients (DDP)": 2 * _around(question.devices, rows),
    }


def _largest(question: Question, beside: int, rows: Callable[[Question, int], dict[str, int]]) -> int:
    """By halving."""
    assert question.device_memory is not None
    low, high = 0, 1
    while beside + sum(rows(question, high).values()) <= question.device_memory and high < 1 << 50:
        low, high = high, 2 * high
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        fits = beside + sum(rows(question, middle).values()) <= question.device_memory
        low, high = (middle, high) if fits else (low, middle)
    return low


def _measure(question: Question) -> dict[str, float]:
    """Steps of a small part on this device, scaled to the whole. What the devices tell each other is not counted."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = question.row_views * question.batch_size
    own = local_range(question.instances, 0, question.devices)[1]
    some_rows = min(own, 64 * rows_per_block(batch, device), 1 << 17)
    products = question.config.classifier.precision if has_bfloat16(device) else "float32"
    classifier = InstanceClassifier(
        some_rows, question.dim, keep_bytes=0, device=device, precision=products or "float32"
    )
    x, ids = torch.randn(batch, question.dim, device=device), torch.arange(batch, device=device) % some_rows

    def step() -> None:
        classifier(x.clone().requires_grad_(), ids).backward()
        classifier.update(0.0)

    precision = question.config.model.encoder_precision if has_bfloat16(device) else "float32"
    network = _build(*_description(question), precision or "float32").to(device)
    views = question.views * question.batch_size // question.devices
    some_views = min(views, 16 if device.type == "cpu" else 128)
    images = torch.zeros(some_views, 3, question.image_size, question.image_size, device=device)

    def encode() -> None:
        network(images).sum().backward()

    rows_seconds = _median_seconds(step, device) * own / some_rows
    encoder_seconds = _median_seconds(encode, device) * views / some_views
    return {"rows": rows_seconds, "encoder": encoder_seconds}


def _median_seconds(work: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return sorted(seconds[1:])[1]

"""What bounds a step of the classifier on a GPU: products, exponentials, its memory, or the network?

A roofline: what the step cannot do without, divided by the published peak of each part of the device. All parts work at
the same time, so the slowest one is the limit, and no step is faster. How near a step comes is for measurements to say.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millionway.parallel.layout import local_range
from millionway.settings.pretrain import Precision

if TYPE_CHECKING:
    from millionway.train.plan import Question

FLOAT = 4
GPUS_OF_A_MACHINE = 8
EXPONENTIALS_PER_CYCLE = (
    16  # of a multiprocessor, capability 7.0 to 9.0: CUDA C Programming Guide, arithmetic throughput
)
TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Gpu:
    """Published peaks, per second, without sparsity; of the SXM modules in NVIDIA's DGX machines."""

    name: str
    memory: float
    """bytes"""
    memory_bandwidth: float
    """bytes"""
    multiprocessors: int
    clock: float
    """cycles, boosted"""
    products: dict[Precision, float]
    """floating-point operations"""
    link: float
    """bytes to other GPUs of the machine, one way"""
    network: float
    """bytes to other machines, one way: a GPU's share of the adapters"""

    @property
    def exponentials(self) -> float:
        return EXPONENTIALS_PER_CYCLE * self.multiprocessors * self.clock


# NVIDIA's data sheets and white papers: Tesla V100 (2017), A100 80 GB (2020), H100 (2022); DGX-1, DGX A100, DGX H100.
GPUS = (
    Gpu("V100", 32e9, 900e9, 80, 1.53e9, {"float32": 15.7e12}, 150e9, 4 * 12.5e9 / 8),
    Gpu(
        "A100",
        80e9,
        2039e9,
        108,
        1.41e9,
        {"float32": 19.5e12, "tf32": 156e12, "bfloat16": 312e12},
        300e9,
        8 * 25e9 / 8,
    ),
    Gpu(
        "H100",
        80e9,
        3350e9,
        132,
        1.83e9,
        {"float32": 66.9e12, "tf32": 494.7e12, "bfloat16": 989.4e12},
        450e9,
        8 * 50e9 / 8,
    ),
)


@dataclass(frozen=True)
class Work:
    """Of one device in a step, fused kernels, exponentials computed again. Per step of all devices together."""

    products: float
    """floating-point operations: scores and O, scores again and gradient"""
    exponentials: float
    memory_bytes: float
    """pass 1 reads rows and lengths; pass 2 reads rows, momentum and lengths, and writes them"""
    network_bytes: float
    """sent"""
    kept_bytes: float
    """rows, momentum, lengths, and the table of hardest classes"""


@dataclass(frozen=True)
class Bound:
    """Seconds that each part of a kind of GPU takes at its peak."""

    gpu: str
    precision: Precision
    seconds: dict[str, float] = field(default_factory=dict)
    fits: bool = True
    """whether rows, momentum and the table of hardest classes fit into its memory"""

    @property
    def limit(self) -> str:
        return max(self.seconds, key=lambda part: self.seconds[part])


def work_of(question: "Question", network_bytes: float) -> Work:
    """network_bytes: what a device sends in a step."""
    batch, dim = question.row_views * question.batch_size, question.dim
    own = local_range(question.instances, 0, question.devices)[1]
    stored = own * dim * (2 if question.storage == "bfloat16" else FLOAT)
    lengths = own * FLOAT
    return Work(
        products=4 * 2.0 * batch * own * dim,
        exponentials=2.0 * batch * own,
        memory_bytes=(stored + lengths) + (4 * stored + 2 * lengths),
        network_bytes=network_bytes,
        kept_bytes=2 * stored + lengths + own * question.hardest * FLOAT,
    )


def bounds(work: Work, devices: int) -> Iterator[Bound]:
    """For every GPU, by what the products compute in."""
    for gpu in GPUS:
        network = gpu.link if devices <= GPUS_OF_A_MACHINE else min(gpu.link, gpu.network)
        for precision, operations in gpu.products.items():
            seconds = {
                "products": work.products / operations,
                "exponentials": work.exponentials / gpu.exponentials,
                "memory": work.memory_bytes / gpu.memory_bandwidth,
                "network": work.network_bytes / network,
            }
            yield Bound(gpu.name, precision, seconds, work.kept_bytes <= gpu.memory)


def in_words(work: Work, found: list[Bound]) -> Iterator[tuple[str, ...]]:
    """(what, how much or how long, limit), line by line."""
    yield "products of a step", f"{work.products / TERA:.3g} TFLOP", ""
    yield "exponentials", f"{work.exponentials / GIGA:.3g} G", ""
    yield "rows and momentum read and written", f"{work.memory_bytes / GIGA:.3g} GB", ""
    yield "sent to other devices", f"{work.network_bytes / GIGA:.3g} GB", ""
    for bound in found:
        yield f"{bound.gpu}, {bound.precision}", *time_and_limit(bound)


def time_and_limit(bound: Bound) -> tuple[str, str]:
    if not bound.fits:
        return "", "does not fit"
    seconds = bound.seconds[bound.limit]
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms", bound.limit

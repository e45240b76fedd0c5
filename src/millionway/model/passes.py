"""Who computes the two passes: the loop of softmax.py or the kernels of kernels.py.

Both are measured where they run. On a CUDA device `auto` lets both work through a few blocks, compares the results, and
takes the faster one. A kernel that does not compile, or disagrees, is never used.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from millionway import randomness
from millionway.console import first_line
from millionway.model import softmax
from millionway.model.products import PRECISIONS, computed_in
from millionway.model.rows import Rows, inverse_norms, rows_per_block, unit
from millionway.model.softmax import FirstPass, Move
from millionway.settings.pretrain import Kernel, Precision

log = logging.getLogger("millionway")

KERNELS: tuple[Kernel, ...] = get_args(Kernel)
TRIAL_ROWS = 8192
TRIAL_TARGETS = 3
# How far the two may be apart, relative to the result: rounding of the products, many times over.
TOLERANCE: dict[Precision, float] = {"float32": 1e-4, "tf32": 1e-2, "bfloat16": 5e-2}
STORAGE_TOLERANCE = {torch.float32: 0.0, torch.bfloat16: 1e-2}  # rounding at random may go the other way


def check_choice(kernel: str, precision: str, rows_in: str | Path) -> None:
    """What a classifier is asked to compute with."""
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, not {kernel!r}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, not {precision!r}")
    if kernel == "triton" and rows_in != "device":
        raise ValueError(f"the triton kernels need rows on the device, not in {rows_in}")


@runtime_checkable
class Passes(Protocol):
    """The sparse part, and the two passes with what they need."""

    def kept_dtype(self, unit_x: Tensor, temperature: float) -> torch.dtype | None:
        """Of exponentials that the first pass keeps for the second; None if it keeps none."""
        ...

    def pairs(self, targets: Tensor, rows: Rows) -> Any: ...

    def largest_logits(self, unit_x: Tensor, rows: Rows, pairs: Any, temperature: float) -> Tensor: ...

    def first_pass(
        self, unit_x: Tensor, rows: Rows, pairs: Any, temperature: float, shift: Tensor | None, kept: list[Tensor]
    ) -> FirstPass: ...

    def second_pass(
        self,
        unit_x: Tensor,
        rows: Rows,
        pairs: Any,
        pair_q: Tensor,
        first: FirstPass,
        z: Tensor,
        temperature: float,
        move: Move,
    ) -> None: ...


@dataclass(frozen=True)
class TorchPasses:
    """The loop of softmax.py; float32 is float32 whatever the process has switched on."""

    precision: Precision = "float32"

    def kept_dtype(self, unit_x: Tensor, temperature: float) -> torch.dtype | None:
        return softmax.exponentials_dtype(unit_x, temperature, self.precision)

    def pairs(self, targets: Tensor, rows: Rows) -> softmax.Pairs:
        return softmax.Pairs.build(targets, len(rows), rows.block)

    def largest_logits(self, unit_x: Tensor, rows: Rows, pairs: Any, temperature: float) -> Tensor:
        with computed_in(self.precision):
            return softmax.largest_logits(unit_x, rows, pairs, temperature, self.precision)

    def first_pass(
        self, unit_x: Tensor, rows: Rows, pairs: Any, temperature: float, shift: Tensor | None, kept: list[Tensor]
    ) -> FirstPass:
        with computed_in(self.precision):
            return softmax.first_pass(unit_x, rows, pairs, temperature, shift, kept, self.precision)

    def second_pass(
        self,
        unit_x: Tensor,
        rows: Rows,
        pairs: Any,
        pair_q: Tensor,
        first: FirstPass,
        z: Tensor,
        temperature: float,
        move: Move,
    ) -> None:
        with computed_in(self.precision):
            softmax.second_pass(unit_x, rows, pairs, pair_q, first, z, temperature, move, self.precision)


@dataclass(frozen=True)
class _Case:
    """What the choice depends on."""

    device: torch.device
    dim: int
    storage: torch.dtype
    precision: Precision
    batch: int
    temperature: float


def choose(
    kernel: Kernel,
    device: torch.device,
    dim: int,
    storage: torch.dtype,
    precision: Precision,
    batch: int,
    temperature: float,
) -> Passes:
    """kernel: `torch` and `triton` are taken at their word; `triton` that cannot be used is a ValueError."""
    case = _Case(device, dim, storage, precision, batch, temperature)
    loop = TorchPasses(precision)
    if kernel == "torch" or (kernel == "auto" and device.type != "cuda"):
        return loop
    fused, reason = _fused(case)
    if fused is not None:
        reason = _disagreement(fused, loop, case)
    if reason is None and kernel == "auto":
        assert fused is not None
        seconds, loop_seconds = (_seconds(lambda each=each: _trial(each, case), device) for each in (fused, loop))
        timing = f"kernel {1e3 * seconds:.1f} ms, torch loop {1e3 * loop_seconds:.1f} ms for {TRIAL_ROWS} rows"
        if seconds < loop_seconds:
            log.debug("classifier: fused kernel (%s)", timing)
            return fused
        reason = f"it is slower here: {timing}"
    if reason is None:
        assert fused is not None
        return fused
    if kernel == "triton":
        raise ValueError(f"--kernel triton cannot be used: {reason}. Use --kernel auto or torch.")
    log.debug("classifier: torch loop; no kernel, because %s", reason)
    return loop


def _fused(case: _Case) -> tuple[Passes | None, str | None]:
    """(the kernels, None) or (None, why not)"""
    try:
        from millionway.model import fused
    except ImportError as error:
        return None, f"Triton is not here ({error})"
    if case.device.type != "cuda" and not fused.is_emulated():
        return None, f"it needs a CUDA device, not {case.device.type}"
    if case.dim > fused.MAX_DIM:
        return None, f"it is for at most {fused.MAX_DIM} dimensions, not {case.dim}"
    if case.storage not in fused.STORAGE:
        return None, f"rows are stored in {case.storage}"
    if case.device.type == "cuda" and case.precision != "float32":
        generation = torch.cuda.get_device_capability(case.device)[0]
        if generation < fused.TENSOR_CORES:
            return None, f"{case.precision} products need compute capability {fused.TENSOR_CORES}.0 or newer"
    return fused.FusedPasses(case.dim, case.precision), None


def _trial(passes: Passes, case: _Case) -> dict[str, Tensor]:
    """A step on a few blocks of made-up rows; some are dead, some targets elsewhere."""
    num, key = TRIAL_ROWS, randomness.key_of(0, "trial")
    draw = lambda key, num: randomness.normal(key, torch.arange(num), case.dim).to(case.device)
    weight = draw(key, num).to(case.storage)
    dead = torch.zeros(num, dtype=torch.bool, device=case.device)
    dead[::97] = True
    momentum, inverse = torch.zeros_like(weight), inverse_norms(weight.float())
    rows = Rows(weight, momentum, inverse, rows_per_block(case.batch, case.device), dead)
    unit_x, _ = unit(draw(key + 1, case.batch))
    targets = torch.arange(case.batch * TRIAL_TARGETS, device=case.device).view(case.batch, -1) * 7 % (num + 100)
    pairs = passes.pairs(targets, rows)
    shift = None
    if case.temperature < softmax.NO_SHIFT_ABOVE:
        shift = passes.largest_logits(unit_x, rows, pairs, case.temperature)[0]
    first = passes.first_pass(unit_x, rows, pairs, case.temperature, shift, [])
    if isinstance(pairs, softmax.Pairs) and not pairs.bounds:
        pairs.bounds = pairs.unread.tolist()
    q = torch.full_like(first.pair_logits, 1 / TRIAL_TARGETS)
    passes.second_pass(unit_x, rows, pairs, q, first, first.z, case.temperature, Move(1.0, 0.9, 1e-4, key))
    at_targets = unit_x.new_full((targets.numel(),), -torch.inf)
    at_targets[pairs.places] = first.pair_logits
    finite = torch.where(torch.isinf(at_targets), 0.0, at_targets)
    return {
        "Z": first.z,
        "O": first.o,
        "scores of targets": finite,
        "rows": weight,
        "momentum": momentum,
        "lengths": inverse,
    }


def _disagreement(fused: Passes, loop: Passes, case: _Case) -> str | None:
    """What is wrong with the kernels, if anything is."""
    try:
        ours = _trial(fused, case)
    except Exception as error:  # compilers and drivers fail in many ways; the loop does not need them
        return f"it does not run here ({type(error).__name__}: {first_line(error)})"
    tolerance = TOLERANCE[case.precision] + STORAGE_TOLERANCE[case.storage]
    for name, expected in _trial(loop, case).items():
        error = _relative_error(ours[name], expected)
        if not error <= tolerance:
            return f"its {name} are off by {error:.2g} of their size"
    return None


def _relative_error(a: Tensor, b: Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The median of a few."""
    seconds = []
    for _ in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return sorted(seconds[1:])[1]

"""Run with TRITON_INTERPRET=1, in a process of its own: the kernels give numbers on a CPU, compared with slow twins."""

import logging
import sys
import traceback
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import reference

from millionway.model import fused, passes, softmax
from millionway.model.classifier import InstanceClassifier
from millionway.model.rows import Rows, inverse_norms, unit
from millionway.settings.pretrain import Kernel


def make(num: int, dim: int, tau: float, dtype: torch.dtype, kernel: Kernel, **options) -> InstanceClassifier:
    """A classifier with row lengths from 0.1 to 10, and one row too short to have a direction."""
    classifier = InstanceClassifier(num, dim, tau, storage=dtype, kernel=kernel, keep_bytes=0, **options)
    g = torch.Generator().manual_seed(num)
    rows = torch.randn(num, dim, generator=g)
    rows *= 10 ** (2 * torch.rand(num, 1, generator=g) - 1) / rows.norm(dim=1, keepdim=True)
    if num > 3:
        rows[2] = 1e-20
    classifier.set_rows(torch.arange(num), rows)
    return classifier


def trusting(trial: str = "_disagreement"):
    """Without the trial at the first step, which is slow here and has a check of its own."""
    return mock.patch.object(passes, trial, lambda *_: None)


def equal_to_the_dense_reference() -> None:
    """Awkward numbers of rows, samples and dimensions; temperatures from 1 to 0.01; two steps, with smoothing."""
    cases = [
        (1, 16, 1, 0.15, 0.0),
        (37, 20, 5, 0.15, 0.2),
        (37, 20, 5, 1.0, 0.2),
        (65, 64, 1, 0.15, 0.0),
        (130, 100, 70, 0.05, 0.2),
        (70, 128, 33, 0.15, 0.2),
        (70, 128, 33, 0.02, 0.2),
        (70, 128, 33, 0.01, 0.0),
        (40, 256, 3, 0.15, 0.2),
        (40, 5, 3, 0.01, 0.2),
    ]
    for num, dim, batch, tau, alpha in cases:
        classifier = make(num, dim, tau, torch.float32, "triton")
        table = classifier.hardest(min(3, num - 1)) if alpha else None
        g = torch.Generator().manual_seed(batch)
        tolerance = 1e-5 if tau >= 0.05 else 1e-4
        for _ in range(2):
            dense = reference.DenseClassifier(classifier.weight.double(), tau, classifier.momentum.double())
            ids = torch.randint(num, (batch,), generator=g)
            x = classifier.weight[ids] + torch.randn(batch, dim, generator=g)
            leaf = x.clone().requires_grad_()
            with trusting():
                loss = classifier(leaf, ids, table, alpha)
            loss.backward()
            classifier.update(0.1)
            assert isinstance(classifier._passes, fused.FusedPasses)
            expected, gradient = dense.step(x.double(), ids, 0.1, table, alpha)
            case = (num, dim, batch, tau, alpha)
            assert abs(float(loss.detach()) - float(expected)) <= tolerance * max(1.0, abs(float(expected))), case
            assert leaf.grad is not None
            scale = max(float(gradient.norm()), float(1 / (tau * x.norm(dim=1).min())) / batch)
            assert float((leaf.grad.double() - gradient).norm()) < tolerance * scale, case
            assert reference.relative_error(classifier.weight, dense.rows.detach()) < tolerance, case
            lengths = classifier._inverse_norms.of(
                classifier.weight, torch.float32, classifier.device, classifier.store
            )
            assert torch.allclose(lengths, inverse_norms(classifier.weight), rtol=1e-6), case


def dead_rows_stay(tau: float = 0.15) -> None:
    """Out of Z, and neither row nor momentum moves; the others are those of the torch loop."""
    for tau in (0.15, 0.02):
        results = []
        for kernel in ("torch", "triton"):
            classifier = make(90, 32, tau, torch.float32, kernel)
            classifier.momentum.fill_(0.5)
            classifier.alive[[0, 50, 89]] = False
            before = classifier.weight.clone()
            x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
            with trusting():
                loss = classifier(x, torch.arange(3, 9))
            loss.backward()
            classifier.update(0.1)
            for row in (0, 50, 89):
                assert torch.equal(classifier.weight[row], before[row])
                assert bool((classifier.momentum[row] == 0.5).all())
            results.append((loss.detach(), x.grad, classifier.weight, classifier.momentum))
        for ours, theirs in zip(*results):
            assert reference.relative_error(ours, theirs) < 1e-5


def sampled_rows_move_alone() -> None:
    results = []
    for kernel in ("torch", "triton"):
        classifier = make(90, 32, 0.15, torch.float32, kernel, classes_per_step=20)
        before = classifier.weight.clone()
        x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with trusting():
            classifier(x, torch.arange(3, 9)).backward()
        classifier.update(0.1)
        assert int((classifier.weight != before).any(dim=1).sum()) <= 26
        results.append((x.grad, classifier.weight, classifier.momentum))
    for ours, theirs in zip(*results):
        assert reference.relative_error(ours, theirs) < 1e-5


def bfloat16_rows_round_with_the_same_bits() -> None:
    """Sums differ in their last bits, so a few numbers end on the other side; never further than the next one."""
    results = []
    for kernel in ("torch", "triton"):
        classifier = make(200, 100, 0.15, torch.bfloat16, kernel)
        x = torch.randn(40, 100, generator=torch.Generator().manual_seed(0)).requires_grad_()
        for _ in range(2):
            with trusting():
                classifier(x, torch.arange(40)).backward()
            classifier.update(0.1)
        results.append((classifier.weight, classifier.momentum))
    for name, ours, theirs in zip(("rows", "momentum"), *results):
        steps = (ours.view(torch.int16).int() - theirs.view(torch.int16).int()).abs()
        assert float((steps > 0).float().mean()) < 0.005, (name, float((steps > 0).float().mean()))
        assert reference.relative_error(ours, theirs) < 1e-3, name


def noise_is_that_of_the_torch_loop() -> None:
    """With gradients of zero there is nothing but weight decay and rounding: the same bits everywhere."""
    results = []
    for who in (passes.TorchPasses(), fused.FusedPasses(40)):
        g = torch.Generator().manual_seed(1)
        weight = torch.randn(150, 40, generator=g).bfloat16()
        velocity = torch.randn(150, 40, generator=g).bfloat16()
        rows = Rows(weight, velocity, inverse_norms(weight.float()), 64, first_id=5_000_000_000)
        x = torch.zeros(4, 40)
        pairs = who.pairs(torch.arange(4)[:, None], rows)
        first = who.first_pass(x, rows, pairs, 0.15, None, [])
        who.second_pass(x, rows, pairs, first.pair_logits * 0, first, first.z, 0.15, softmax.Move(0.5, 0.9, 0.0, 77))
        results.append((weight, velocity))
    for ours, theirs in zip(*results):
        assert float((ours != theirs).float().mean()) < 1e-3


def a_target_elsewhere_counts_nowhere() -> None:
    """As on several ranks: some targets are not among the rows, below them and beyond."""
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(50, 32, generator=g)
    targets = torch.tensor([[-3, 4], [49, 50], [7, 7], [-1, 99]])
    unit_x, _ = unit(torch.randn(4, 32, generator=g))
    found = []
    for who in (passes.TorchPasses(), fused.FusedPasses(32)):
        rows = Rows(weight.clone(), torch.zeros(50, 32), inverse_norms(weight), 16)
        pairs = who.pairs(targets, rows)
        first = who.first_pass(unit_x, rows, pairs, 0.15, None, [])
        at_targets = torch.full((8,), -torch.inf)
        at_targets[pairs.places] = first.pair_logits
        largest = who.largest_logits(unit_x, rows, pairs, 0.15)
        q = at_targets.exp2().clamp(max=1.0)[pairs.places]
        who.second_pass(unit_x, rows, pairs, q, first, first.z, 0.15, softmax.Move(0.5, 0.9, 0.0, 77))
        found.append((at_targets.exp2(), largest[0], largest[1, :3], rows.weight))
    for ours, theirs in zip(*found):
        assert reference.relative_error(ours, theirs) < 1e-5


def offsets_are_64_bits() -> None:
    """A row beyond 2^31 numbers; of the 4 GB only the pages that are touched exist."""
    num = (1 << 31) // 128 + 10
    weight = torch.zeros(num, 128, dtype=torch.bfloat16)
    weight[num - 2] = 1.0
    rows = Rows(weight, weight, torch.ones(num, 1), 1024)
    pairs = fused.Pairs.build(torch.tensor([[num - 2, 3]]), num, 64)
    x = torch.ones(1, 128) / softmax.LOG2_E
    near, far = fused.FusedPasses(128)._pair_logits(x, rows, pairs).tolist()
    assert near == 0 and abs(far / float(x.sum()) - 1) < 1e-6, (near, far)


def lower_precisions_are_as_far_off_as_they_should_be() -> None:
    """Rounded operands: about 2^-11 and 2^-8 of the scores, whatever the size."""
    g = torch.Generator().manual_seed(1)
    weight, unit_x = torch.randn(300, 128, generator=g), unit(torch.randn(20, 128, generator=g))[0]
    inverse = inverse_norms(weight)
    e = torch.exp(unit_x.double() @ (weight * inverse).double().T / 0.15)
    errors = []
    for precision in ("float32", "tf32", "bfloat16"):
        for who in (passes.TorchPasses(precision), fused.FusedPasses(128, precision)):
            rows = Rows(weight, torch.zeros(300, 128), inverse, 64)
            pairs = who.pairs(torch.arange(20)[:, None], rows)
            first = who.first_pass(unit_x, rows, pairs, 0.15, None, [])
            errors.append(reference.relative_error(first.o, e @ (weight * inverse).double()))
    loop32, kernel32, loop_tf32, kernel_tf32, loop_bf16, kernel_bf16 = errors
    assert max(loop32, kernel32) < 1e-6 < min(loop_tf32, kernel_tf32), errors
    assert max(loop_tf32, kernel_tf32) < 5e-4 < 1e-3 < min(loop_bf16, kernel_bf16), errors
    assert max(loop_bf16, kernel_bf16) < 4e-3, errors


def the_faster_one_is_chosen() -> None:
    """`auto` is for CUDA alone; the rest of the choice is the same here."""
    case = (16, torch.float32, "float32", 8, 0.15)
    cpu = torch.device("cpu")
    assert isinstance(passes.choose("auto", cpu, *case), passes.TorchPasses)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    passes.log.addHandler(handler)
    passes.log.setLevel(logging.DEBUG)
    with mock.patch.object(passes, "TRIAL_ROWS", 150):
        assert isinstance(passes.choose("triton", cpu, *case), fused.FusedPasses)
        for storage, dim, precision in (
            (torch.bfloat16, 100, "float32"),
            (torch.float32, 128, "tf32"),
            (torch.float32, 128, "bfloat16"),
        ):
            assert isinstance(passes.choose("triton", cpu, dim, storage, precision, 5, 0.02), fused.FusedPasses)
        for refused, reason in ((300, "at most 256 dimensions"), (16, "stored in torch.float64")):
            try:
                passes.choose("triton", cpu, refused, torch.float64 if refused == 16 else torch.float32, *case[2:])
            except ValueError as error:
                assert reason in str(error), error
            else:
                raise AssertionError(f"not refused: {reason}")
    del said[:]
    for seconds, expected, word in (
        ((1.0, 2.0), fused.FusedPasses, "fused kernel (kernel 1000.0 ms, torch loop 2000.0 ms"),
        ((2.0, 1.0), passes.TorchPasses, "slower here"),
    ):
        with trusting(), mock.patch.object(passes, "_seconds", side_effect=seconds):
            chosen = passes.choose("auto", torch.device("cuda"), *case)
        assert isinstance(chosen, expected) and word in said[-1], said


def a_kernel_that_is_wrong_or_broken_is_never_used() -> None:
    case = (torch.device("cpu"), 16, torch.float32, "float32", 8, 0.15)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of shared memory\nRequired: 1 TB")

    def wrong(self, *arguments: object) -> softmax.FirstPass:
        first = right(self, *arguments)
        first.o[3, 2] += 1.0
        return first

    right = fused.FusedPasses.first_pass
    for name, stand_in, word in (
        ("first_pass", broken, "does not run here (RuntimeError: out of shared memory)"),
        ("first_pass", wrong, "its O are off by"),
        ("second_pass", lambda *_: None, "its rows are off by"),
    ):
        with mock.patch.object(fused.FusedPasses, name, stand_in), mock.patch.object(passes, "TRIAL_ROWS", 150):
            try:
                passes.choose("triton", *case)
            except ValueError as error:
                assert word in str(error), error
            else:
                raise AssertionError(f"not refused: {word}")


CHECKS = [
    equal_to_the_dense_reference,
    dead_rows_stay,
    sampled_rows_move_alone,
    bfloat16_rows_round_with_the_same_bits,
    noise_is_that_of_the_torch_loop,
    a_target_elsewhere_counts_nowhere,
    offsets_are_64_bits,
    lower_precisions_are_as_far_off_as_they_should_be,
    the_faster_one_is_chosen,
    a_kernel_that_is_wrong_or_broken_is_never_used,
]

if __name__ == "__main__":
    assert fused.is_emulated(), "TRITON_INTERPRET=1 must be set before Triton is imported"
    torch.set_num_threads(1)
    failed = False
    for check in CHECKS:
        try:
            check()
            print(f"{check.__name__}: well", flush=True)
        except BaseException:
            failed = True
            print(f"{check.__name__}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    raise SystemExit(failed)

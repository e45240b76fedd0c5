import inspect
from unittest import mock

import pytest
import reference
import torch
from classifiers import blocks_of, make
from hypothesis import given
from hypothesis import strategies as st

from millionway.model import compare, products, softmax
from millionway.model import hardest as hardest_search
from millionway.model.classifier import InstanceClassifier, NotFiniteError


@given(
    num=st.integers(1, 40),
    dim=st.integers(2, 9),
    batch=st.integers(1, 12),
    tau=st.sampled_from([1.0, 0.15, 0.05, 0.01]),
    alpha=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 1000),
    block=st.sampled_from([1, 7, 1000]),
    keep_bytes=st.sampled_from([0, 300, 1 << 20]),
)
def test_equals_dense_reference(
    num: int, dim: int, batch: int, tau: float, alpha: float, seed: int, block: int, keep_bytes: int
) -> None:
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5 if tau >= 0.05 else 1e-4)):
        classifier = make(num, dim, tau, dtype, seed, keep_bytes=keep_bytes)
        hardest = classifier.hardest(min(3, num - 1)) if num > 1 else None
        g = torch.Generator().manual_seed(seed + 1)
        for _ in range(2):  # the second step has a momentum
            # Each step starts from the same state on both sides: short rows move far, and errors would grow by that.
            dense = reference.DenseClassifier(classifier.weight.double(), tau, classifier.momentum.double())
            ids = torch.randint(num, (batch,), generator=g)
            # An embedding near its row, so that the loss is not only noise; ids may repeat, as two views do.
            x = classifier.weight[ids].double() + torch.randn(batch, dim, generator=g, dtype=torch.float64)
            x = x.to(dtype).double()
            leaf = x.clone().to(dtype).requires_grad_()
            with blocks_of(block):
                loss = classifier(leaf, ids, hardest, alpha)
                (3.0 * loss).backward()
                classifier.update(0.1)
            expected, gradient = dense.step(x, ids, 0.1, hardest, alpha)
            assert leaf.grad is not None
            # p - q may cancel: then the error is measured against the terms, which are of the order of 1 / (tau |x|).
            assert abs(float(loss.detach()) - float(expected)) <= tolerance * max(1.0, abs(float(expected)))
            scale = max(float(gradient.norm()), float(1 / (tau * x.norm(dim=1).min())) / batch)
            assert float((leaf.grad.double() / 3.0 - gradient).norm()) < tolerance * scale
            assert reference.relative_error(classifier.weight, dense.rows.detach()) < tolerance


def test_equals_dense_reference_for_twenty_steps() -> None:
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        classifier = make(500, 32, 0.15, dtype)
        dense = reference.DenseClassifier(classifier.weight.double(), 0.15)
        hardest = classifier.hardest(5)
        g = torch.Generator().manual_seed(3)
        for _ in range(20):
            ids = torch.randint(500, (32,), generator=g).repeat(2)
            x = torch.randn(64, 32, generator=g, dtype=torch.float64)
            leaf = x.clone().to(dtype).requires_grad_()
            loss = classifier(leaf, ids, hardest, 0.2)
            loss.backward()
            classifier.update(0.5)
            expected, gradient = dense.step(x, ids, 0.5, hardest, 0.2)
            assert abs(float(loss.detach()) / float(expected) - 1) < tolerance
            assert leaf.grad is not None and reference.relative_error(leaf.grad, gradient) < tolerance
        assert reference.relative_error(classifier.weight, dense.rows.detach()) < tolerance
        assert reference.relative_error(classifier.momentum, dense.momentum) < tolerance


@pytest.mark.parametrize("has_instructions", [True, False])
@pytest.mark.parametrize("tau", [0.15, 0.05, 0.02])
def test_products_in_bfloat16_are_near_the_dense_reference(
    monkeypatch: pytest.MonkeyPatch, has_instructions: bool, tau: float
) -> None:
    """Kept or computed again, with dead rows and smoothed labels; by tensors of bfloat16 or emulated."""
    monkeypatch.setattr(products, "has_bfloat16", lambda device: has_instructions)
    ids, g = torch.arange(40).repeat(2), torch.Generator().manual_seed(3)
    found, gradients = [], []
    for keep_bytes in (1 << 30, 0):
        classifier = make(500, 64, tau, torch.float32, precision="bfloat16", keep_bytes=keep_bytes)
        classifier.alive[100:] = torch.arange(400) % 7 > 0
        living = classifier.alive.nonzero()[:, 0]
        dense = reference.DenseClassifier(classifier.weight[living].double(), tau)
        hardest = classifier.hardest(5)
        known = torch.searchsorted(living, hardest.long()).to(torch.int32)[living]
        x = classifier.weight[ids] / classifier.weight[ids].norm(dim=1, keepdim=True)
        leaf = (0.5 * x + torch.randn(80, 64, generator=g.manual_seed(1)) / 8).requires_grad_()
        with blocks_of(64):
            loss = classifier(leaf, ids, hardest, 0.2)
            loss.backward()
            kept = classifier._kept.blocks
            classifier.update(0.5)
        expected, gradient = dense.step(leaf.detach().double(), ids, 0.5, known, 0.2)
        assert [block.dtype for block in kept[:1]] == (
            [torch.bfloat16 if has_instructions and tau >= 0.05 else torch.float32] if keep_bytes else []
        )
        assert abs(float(loss.detach() - expected)) < 0.02
        assert leaf.grad is not None and reference.relative_error(leaf.grad, gradient) < 0.03
        assert reference.relative_error(classifier.momentum[living], dense.momentum) < 0.03
        found.append(classifier.momentum.clone())
        gradients.append(leaf.grad)
    assert torch.equal(*found) and torch.equal(*gradients)


@pytest.mark.parametrize(("num", "tau"), [(100, 0.1), (2000, 0.1), (2000, 0.05)])
def test_in_bfloat16_images_that_are_known_well_have_good_gradients(
    monkeypatch: pytest.MonkeyPatch, num: int, tau: float
) -> None:
    """p of an own row is near 1, so that p - q is a small difference."""
    monkeypatch.setattr(products, "has_bfloat16", lambda device: True)
    classifier = make(num, 64, tau, torch.float32, precision="bfloat16")
    dense = reference.DenseClassifier(classifier.weight.double(), tau)
    ids = torch.arange(40)
    rows = classifier.weight[ids] / classifier.weight[ids].norm(dim=1, keepdim=True)
    leaf = (0.95 * rows + 0.04 * torch.randn(40, 64, generator=torch.Generator().manual_seed(1))).requires_grad_()
    loss = classifier(leaf, ids)
    loss.backward()
    classifier.update(0.5)
    expected, gradient = dense.step(leaf.detach().double(), ids, 0.5, None, 0.0)
    assert 0 < float(loss.detach()) == pytest.approx(float(expected), rel=0.02)
    assert leaf.grad is not None and reference.relative_error(leaf.grad, gradient) < 0.02
    assert reference.relative_error(classifier.momentum, dense.momentum) < 0.02


def test_memory_for_exponentials_follows_their_dtype() -> None:
    classifier = make(300, 16, 0.1, torch.float32, precision="bfloat16")
    for tau in (0.1, 0.04, 0.1):
        classifier.temperature = tau
        classifier(torch.randn(8, 16).requires_grad_(), torch.arange(8))
        classifier.update(0.1)


def test_a_failed_update_is_not_forgotten() -> None:
    classifier = make(50, 8)
    x, ids = torch.randn(4, 8, dtype=torch.float64).requires_grad_(), torch.arange(4)
    with blocks_of(16):
        classifier(x, ids)
        with (
            mock.patch.object(softmax.Move, "__call__", side_effect=[None] + 9 * [MemoryError]),
            pytest.raises(MemoryError),
        ):
            classifier.update(0.1)
    with pytest.raises(RuntimeError, match="half-way"):
        classifier(x, ids)


def test_zero_vectors_have_cosine_zero_and_no_gradient() -> None:
    classifier = make(6, 4)
    classifier.weight[2] = 0
    x = torch.randn(3, 4, dtype=torch.float64)
    x[0] = 0
    leaf = x.clone().requires_grad_()
    loss = classifier(leaf, torch.tensor([0, 2, 5]))
    loss.backward()
    rows = classifier.weight.clone().requires_grad_()
    assert torch.allclose(loss.detach(), reference.loss(rows, x, torch.tensor([0, 2, 5]), 0.15).detach())
    assert leaf.grad is not None and leaf.grad[0].abs().max() == 0 and torch.isfinite(leaf.grad).all()
    classifier.update(0.1)
    assert torch.isfinite(classifier.weight).all() and classifier.weight[2].abs().max() == 0


def test_update_before_or_after_backward_is_the_same() -> None:
    first, second = make(20, 8), make(20, 8)
    x, ids = torch.randn(5, 8, dtype=torch.float64), torch.arange(5)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = first(a, ids)
    loss.backward()
    first.update(0.1)
    loss = second(b, ids)
    second.update(0.1)
    loss.backward()
    assert torch.equal(first.weight, second.weight)
    assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_misuse_is_refused() -> None:
    classifier = make(20, 8)
    x, ids = torch.randn(5, 8, dtype=torch.float64).requires_grad_(), torch.arange(5)
    with pytest.raises(RuntimeError, match="forward pass"):
        classifier.update(0.1)
    with torch.no_grad():
        classifier(x, ids)
    with pytest.raises(RuntimeError, match="forward pass"):
        classifier.update(0.1)
    classifier(x, ids)
    with pytest.raises(RuntimeError, match="update"):
        classifier(x, ids)


@pytest.mark.parametrize(
    ("x", "ids", "message"),
    [
        (torch.randn(2, 8), torch.tensor([0, 20]), "20 instances"),
        (torch.randn(2, 8), torch.tensor([-1, 0]), "from -1"),
        (torch.randn(2, 8), torch.tensor([0, 1], dtype=torch.int32), "int64"),
        (torch.randn(2, 8), torch.tensor([0]), "2 int64 instance ids"),
        (torch.randn(2, 7), torch.tensor([0, 1]), r"\[batch, 8\]"),
    ],
)
def test_bad_batch_is_named(x: torch.Tensor, ids: torch.Tensor, message: str) -> None:
    classifier = InstanceClassifier(20, 8)
    before = classifier.weight.clone()
    # The shape checks of the tests would be first to complain about a wrong shape, so they are left out here.
    forward = inspect.unwrap(type(classifier).forward)
    with pytest.raises(ValueError, match=message):
        forward(classifier, x, ids)
    assert torch.equal(before, classifier.weight) and classifier._pass is None


def test_nan_is_named() -> None:
    x = torch.randn(2, 8)
    x[1, 3] = torch.nan
    with pytest.raises(NotFiniteError, match=r"1 of 2 vectors are not finite.*instance 7"):
        InstanceClassifier(20, 8)(x, torch.tensor([0, 7]))


def test_a_row_that_is_not_finite_is_not_called_dead() -> None:
    classifier = InstanceClassifier(20, 8)
    classifier.weight[7] = torch.nan
    with pytest.raises(NotFiniteError, match="the row of instance 7 is not finite"):
        classifier(torch.randn(2, 8), torch.tensor([0, 7]))
    classifier.alive[0] = False
    with pytest.raises(ValueError, match="instance 0 of the batch is not alive"):
        classifier(torch.randn(2, 8), torch.tensor([0, 7]))


@pytest.mark.parametrize("value", [{"lr": float("nan")}, {"momentum": -0.1}, {"weight_decay": float("inf")}])
def test_bad_rates_are_named_before_anything_is_written(value: dict) -> None:
    classifier = make(20, 8)
    before = classifier.weight.clone()
    classifier(torch.randn(2, 8, dtype=torch.float64).requires_grad_(), torch.tensor([0, 7]))
    with pytest.raises(ValueError, match=f"{next(iter(value))} must be"):
        classifier.update(**{"lr": 0.1, **value})
    assert torch.equal(before, classifier.weight)
    classifier.update(0.1)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (torch.zeros(20, 3), "int32 ids of hardest"),
        (torch.zeros(19, 3, dtype=torch.int32), r"\[20, k\], not \[19, 3\]"),
        (torch.zeros(20, 0, dtype=torch.int32), r"not \[20, 0\]"),
        (torch.full((20, 3), 20, dtype=torch.int32), "from 20 to 20, but there are 20"),
    ],
)
def test_a_bad_table_is_named(table: torch.Tensor, message: str) -> None:
    forward = inspect.unwrap(InstanceClassifier.forward)
    with pytest.raises(ValueError, match=message):
        forward(InstanceClassifier(20, 8), torch.randn(2, 8), torch.tensor([0, 7]), table, 0.2)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"num_instances": 0}, {"dim": 0}],
)
def test_bad_construction_is_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="not"):
        InstanceClassifier(**{"num_instances": 5, "dim": 3, **options})
    with pytest.raises(ValueError, match="storage"):
        InstanceClassifier(5, 3, storage=torch.float16)


def test_dead_rows_take_no_part() -> None:
    classifier, smaller = make(10, 6), make(10, 6)
    keep = torch.tensor([0, 1, 2, 4, 5, 7, 8, 9])
    classifier.alive[[3, 6]] = False
    part = InstanceClassifier(8, 6, storage=torch.float64)
    part.set_rows(torch.arange(8), smaller.weight[keep])
    x = torch.randn(4, 6, dtype=torch.float64)
    ids = torch.tensor([0, 4, 9, 9])
    part_ids = torch.tensor([0, 3, 7, 7])
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    assert torch.allclose(classifier(a, ids), part(b, part_ids))
    classifier.update(0.3)
    part.update(0.3)
    assert torch.allclose(classifier.weight[keep], part.weight)
    assert torch.equal(classifier.weight[[3, 6]], smaller.weight[[3, 6]])
    assert torch.equal(classifier.num_ahead(x, ids), part.num_ahead(x, part_ids))
    table = classifier.hardest(3)
    assert not {3, 6} & set(table[keep].flatten().tolist())
    with pytest.raises(ValueError, match="not alive"):
        classifier.num_ahead(x[:1], torch.tensor([3]))
    with pytest.raises(ValueError, match="from 1 to 7"):
        classifier.hardest(8)


def test_rows_start_from_the_seed_and_their_number_alone() -> None:
    small, large = InstanceClassifier(10, 4, seed=5), InstanceClassifier(1000, 4, seed=5)
    assert torch.equal(small.weight, large.weight[:10])
    assert not torch.equal(small.weight, InstanceClassifier(10, 4, seed=6).weight)
    assert abs(float(large.weight.std()) - 1) < 0.05 and abs(float(large.weight.mean())) < 0.05


def test_pairs_that_are_read_later_give_the_same_numbers() -> None:
    """As on a GPU, where the host does not wait for the bounds of the blocks before pass 1."""
    build = softmax.Pairs.build

    def later(targets: torch.Tensor, num_rows: int, block: int) -> softmax.Pairs:
        return build(targets, num_rows, block, waiting=False)

    for tau in (0.15, 0.02):
        results = []
        for function in (build, later):
            classifier = make(300, 16, tau)
            classifier.alive[[7, 200]] = False
            with blocks_of(64), mock.patch.object(softmax.Pairs, "build", function):
                losses = run_some(classifier)
            results.append((torch.tensor(losses), classifier.weight, classifier.momentum))
        for ours, theirs in zip(*results):
            assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def run_some(classifier: InstanceClassifier) -> list[float]:
    table, losses = classifier.hardest(4), []
    for step in range(3):
        x = torch.randn(8, classifier.dim, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        losses.append(float(classifier(x.requires_grad_(), torch.arange(10, 18), table, 0.2).detach()))
        classifier.update(0.1)
    return losses


def test_float32_is_float32_whatever_the_process_has_switched_on() -> None:
    before = torch.get_float32_matmul_precision()
    seen = []

    def looking(function):
        def look(*arguments):
            seen.append(torch.backends.cuda.matmul.fp32_precision)
            return function(*arguments)

        return look

    torch.set_float32_matmul_precision("high")
    try:
        classifier = make(50, 8, dtype=torch.float32, keep_bytes=0)
        x = torch.randn(4, 8, requires_grad=True)
        with (
            mock.patch.object(softmax, "_exponentiate", looking(softmax._exponentiate)),
            mock.patch.object(hardest_search, "_top_k", looking(hardest_search._top_k)),
            mock.patch.object(compare, "with_all", looking(compare.with_all)),
        ):
            classifier(x, torch.arange(4))
            classifier.update(0.1)
            classifier.hardest(3)
            classifier.compare(x, torch.arange(4))
        assert set(seen) == {"ieee"} and len(seen) >= 4
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_kernel_is_refused_without_its_device() -> None:
    classifier = InstanceClassifier(5, 4, kernel="triton")
    with pytest.raises(ValueError, match="needs a CUDA device, not cpu"):
        classifier(torch.randn(2, 4), torch.arange(2))


def test_a_row_that_is_not_finite_stops_the_step_before_anything_is_written() -> None:
    classifier = make(50, 8)
    classifier.weight[20, 3] = torch.nan
    with pytest.raises(NotFiniteError, match="a row of the classifier is not finite"):
        classifier(torch.randn(4, 8, dtype=torch.float64), torch.arange(4))

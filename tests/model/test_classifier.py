import inspect
from unittest import mock

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

from millionway.model import softmax
from millionway.model.classifier import InstanceClassifier, NotFiniteError


def make(num: int, dim: int, tau: float = 0.15, dtype: torch.dtype = torch.float64, seed: int = 0, **options):
    """A classifier with row lengths from 0.1 to 10."""
    classifier = InstanceClassifier(num, dim, tau, storage=dtype, **options)
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(num, dim, generator=g, dtype=torch.float64)
    lengths = 10 ** (2 * torch.rand(num, 1, generator=g, dtype=torch.float64) - 1)
    classifier.set_rows(torch.arange(num), (rows / rows.norm(dim=1, keepdim=True) * lengths).to(dtype))
    return classifier


def blocks_of(rows: int):
    """Cut the rows into blocks of this many."""
    return mock.patch.object(softmax, "rows_per_block", lambda batch, device: rows)


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


def run_steps(classifier: InstanceClassifier, num_steps: int, hardest: torch.Tensor | None = None) -> list[float]:
    g = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(num_steps):
        ids = torch.randint(classifier.num_instances, (16,), generator=g).repeat(2)
        x = torch.randn(32, classifier.dim, generator=g).to(classifier.compute_dtype).requires_grad_()
        loss = classifier(x, ids, hardest, 0.2 if hardest is not None else 0.0)
        classifier.update(0.1)
        losses.append(float(loss.detach()))
    return losses


def test_kept_and_recomputed_exponentials_are_the_same_bits() -> None:
    with blocks_of(64):
        results = []
        for keep_bytes in (0, 3 * 64 * 32 * 4, 1 << 30):
            classifier = make(500, 16, dtype=torch.float32, keep_bytes=keep_bytes)
            losses = run_steps(classifier, 5, classifier.hardest(5))
            assert len(classifier._kept) == min(8, keep_bytes // (64 * 32 * 4))
            results.append((losses, classifier.weight, classifier.momentum))
    for losses, weight, momentum in results[1:]:
        assert losses == results[0][0]
        assert torch.equal(weight, results[0][1]) and torch.equal(momentum, results[0][2])


def test_rows_changed_from_outside_are_seen() -> None:
    """Inverse lengths are remembered from step to step."""
    classifier = make(50, 8)
    run_steps(classifier, 2)
    classifier.weight[3] *= 5
    classifier.set_rows(torch.tensor([4]), torch.ones(1, 8, dtype=torch.float64))
    x, ids = torch.randn(4, 8, dtype=torch.float64), torch.tensor([3, 4, 5, 6])
    with torch.no_grad():
        assert torch.allclose(classifier(x, ids), reference.loss(classifier.weight, x, ids, 0.15))


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


def test_bfloat16_rows_keep_small_updates_on_average() -> None:
    """Updates of a 2^-11th of the value: plain rounding loses all of them."""
    value, update = 1.0, 2.0**-11
    rows = softmax.Rows(torch.full((400, 64), value, dtype=torch.bfloat16), torch.zeros(400, 1), 400)
    momentum = torch.zeros(400, 64, dtype=torch.bfloat16)
    plain = rows.weight.clone()
    for step in range(64):
        momentum.fill_(-update)
        move = softmax.Move(lr=1.0, momentum=1.0, weight_decay=0.0, key=1000 * step)
        move(rows.blocks()[0], momentum, torch.zeros(400, 64), torch.empty(400, 64))
        plain = (plain.float() + update).to(torch.bfloat16)
    expected = value + 64 * update
    assert float(plain.float().mean()) == value
    assert abs(float(rows.weight.float().mean()) - expected) < 0.05 * 64 * update
    assert rows.weight.float().std() > 0  # each number is rounded by its own chance


def test_bfloat16_follows_float32() -> None:
    half, full = (InstanceClassifier(300, 16, storage=storage) for storage in (torch.bfloat16, torch.float32))
    full.set_rows(torch.arange(300), half.weight.float())
    with blocks_of(64):
        losses = [run_steps(each, 20, each.hardest(3)) for each in (half, full)]
    assert half.weight.dtype == half.momentum.dtype == torch.bfloat16
    assert max(abs(a - b) for a, b in zip(*losses)) < 0.02
    assert reference.relative_error(half.weight.float(), full.weight) < 0.02
    again = InstanceClassifier(300, 16, storage=torch.bfloat16)
    with blocks_of(64):
        run_steps(again, 20, again.hardest(3))
    assert torch.equal(again.weight, half.weight)  # chance is a function of (seed, step, row)


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
    assert torch.equal(classifier.ranks(x, ids), part.ranks(x, part_ids))
    table = classifier.hardest(3)
    assert not {3, 6} & set(table[keep].flatten().tolist())
    with pytest.raises(ValueError, match="not alive"):
        classifier.ranks(x[:1], torch.tensor([3]))
    with pytest.raises(ValueError, match="from 1 to 7"):
        classifier.hardest(8)


def test_ranks_count_the_better_classes() -> None:
    classifier = make(50, 8)
    x, ids = torch.randn(30, 8, dtype=torch.float64), torch.randint(50, (30,))
    cosines = reference.unit(x) @ reference.unit(classifier.weight).T
    expected = [sum(float(c) >= float(row[i]) for c in row) - 1 for row, i in zip(cosines, ids)]
    assert classifier.ranks(x, ids).tolist() == expected
    # Rows that are all the same tell nothing apart: that is no hit.
    classifier.weight[:] = classifier.weight[0]
    assert classifier.ranks(x, ids).tolist() == [49] * 30


def test_sampled_classes_leave_the_others_alone() -> None:
    classifier = make(100, 8, classes_per_step=10)
    before = classifier.weight.clone()
    ids = torch.tensor([3, 3, 77])
    classifier(torch.randn(3, 8, dtype=torch.float64).requires_grad_(), ids)
    classifier.update(0.1)
    moved = (classifier.weight != before).any(dim=1)
    assert int(moved.sum()) == 12 and moved[3] and moved[77]  # two classes of the batch and ten others
    again = make(100, 8, classes_per_step=10)
    first = again._sampled_classes(ids)
    assert first is not None and torch.equal(first, moved.nonzero()[:, 0])
    again.step = 1
    second = again._sampled_classes(ids)
    assert second is not None and not torch.equal(first, second)
    # With as many as there are, it is the full method.
    full, everyone = make(20, 8), make(20, 8, classes_per_step=1000)
    x = torch.randn(4, 8, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(full(x, torch.arange(4)), everyone(x, torch.arange(4)))


def test_rows_start_from_the_seed_and_their_number_alone() -> None:
    small, large = InstanceClassifier(10, 4, seed=5), InstanceClassifier(1000, 4, seed=5)
    assert torch.equal(small.weight, large.weight[:10])
    assert not torch.equal(small.weight, InstanceClassifier(10, 4, seed=6).weight)
    assert abs(float(large.weight.std()) - 1) < 0.05 and abs(float(large.weight.mean())) < 0.05

import reference
import torch
from classifiers import blocks_of, make, run_steps

from millionway.model.classifier import InstanceClassifier


def test_kept_and_recomputed_exponentials_are_the_same_bits() -> None:
    with blocks_of(64):
        results = []
        for keep_bytes in (0, 3 * 64 * 32 * 4, 1 << 30):
            classifier = make(500, 16, dtype=torch.float32, keep_bytes=keep_bytes)
            losses = run_steps(classifier, 5, classifier.hardest(5))
            assert len(classifier._kept.blocks) == min(8, keep_bytes // (64 * 32 * 4))
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

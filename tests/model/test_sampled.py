import torch
from classifiers import make

from millionway import randomness
from millionway.model import sampled
from millionway.parallel.group import Group


def drawn(step: int, ids: torch.Tensor) -> torch.Tensor:
    """As the classifier of `make(100, ...)` draws ten classes."""
    return sampled.draw(randomness.key_of(0, "classes", step), 10, ids, torch.ones(100, dtype=torch.bool), Group())


def test_sampled_classes_leave_the_others_alone() -> None:
    classifier = make(100, 8, classes_per_step=10)
    before = classifier.weight.clone()
    ids = torch.tensor([3, 3, 77])
    classifier(torch.randn(3, 8, dtype=torch.float64).requires_grad_(), ids)
    classifier.update(0.1)
    moved = (classifier.weight != before).any(dim=1)
    assert int(moved.sum()) == 12 and moved[3] and moved[77]  # two classes of the batch and ten others
    assert torch.equal(drawn(0, ids), moved.nonzero()[:, 0])
    assert not torch.equal(drawn(0, ids), drawn(1, ids))
    # With as many as there are, it is the full method.
    full, everyone = make(20, 8), make(20, 8, classes_per_step=1000)
    x = torch.randn(4, 8, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(full(x, torch.arange(4)), everyone(x, torch.arange(4)))

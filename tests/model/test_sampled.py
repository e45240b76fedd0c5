import torch
from classifiers import make
from hypothesis import given
from hypothesis import strategies as st

from millionway import randomness
from millionway.model import sampled
from millionway.parallel.group import Group


def drawn(step: int, ids: torch.Tensor) -> torch.Tensor:
    """As the classifier of `make(100, ...)` draws ten classes."""
    return sampled.draw(randomness.key_of(0, "classes", step), 10, ids, None, (0, 100), 100, Group())


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


@given(
    num_classes=st.integers(2, 60),
    num=st.integers(1, 80),
    ids=st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    dead=st.sets(st.integers(0, 1000)),
)
def test_own_classes_and_as_many_others_as_there_are(num_classes: int, num: int, ids: list, dead: set) -> None:
    own = {each % num_classes for each in ids}
    dead = {each % num_classes for each in dead} - own
    alive = torch.tensor([each not in dead for each in range(num_classes)])
    about = (~alive if dead else None, (0, num_classes), num_classes, Group())
    chosen = sampled.draw(7, num, torch.tensor(ids) % num_classes, *about).tolist()
    assert chosen == sorted(set(chosen)) and own <= set(chosen) and not dead & set(chosen)
    assert len(chosen) == len(own) + min(num, num_classes - len(own | dead))


def test_every_class_is_drawn_as_often_as_any_other() -> None:
    ids = torch.tensor([3])
    drawn = [sampled.draw(key, 8, ids, None, (0, 50), 50, Group()) for key in range(4000)]
    counts = torch.cat(drawn).bincount(minlength=50)
    assert int(counts[3]) == 4000
    others = counts[torch.arange(50) != 3].double()
    expected = 4000 * 8 / 49
    assert float(((others - expected) ** 2 / expected).sum()) < 85  # 48 degrees of freedom: beyond it once in 1,400


def test_a_few_of_a_hundred_million_are_drawn_without_going_through_all() -> None:
    num = 100_000_000
    chosen = sampled.draw(0, 1000, torch.tensor([5]), None, (0, num), num, Group())
    assert len(chosen) == 1001 and int(chosen[-1]) > 90_000_000

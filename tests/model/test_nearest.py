import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millionway.model import nearest


@given(num=st.integers(1, 3000), k=st.integers(1, 40), num_values=st.integers(2, 50), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_equals_topk_of_all_products(num: int, k: int, num_values: int, seed: int) -> None:
    """Of small whole numbers, so that products are exact and many are equal; others in order, as of sorted classes."""
    g = torch.Generator().manual_seed(seed)
    others = torch.randint(num_values, (num, 6), generator=g).float()
    others = others[others[:, 0].argsort()]
    queries = torch.randint(num_values, (7, 6), generator=g).float()
    k, products = min(k, num), queries @ others.T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nearest, "OTHERS_AT_ONCE", 200)
        patch.setattr(nearest, "QUERIES_AT_ONCE", 3)
        found, places = nearest.nearest(queries, others, k)
    assert torch.equal(found, products.topk(k, dim=1).values) and torch.equal(products.gather(1, places), found)
    assert all(len(set(row)) == k for row in places.tolist())


def test_a_bound_that_was_guessed_too_high_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The near ones are all in the first part, which is every tenth of the others."""
    monkeypatch.setattr(nearest, "OTHERS_AT_ONCE", 100)
    searched_again = []
    running = nearest._running_top_k
    monkeypatch.setattr(nearest, "_running_top_k", lambda *args: (searched_again.append(1), running(*args))[1])
    others = torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))
    others[::10] += 10
    products = torch.ones(2, 4) @ others.T
    found, _ = nearest.nearest(torch.ones(2, 4), others, 25)
    assert torch.allclose(found, products.topk(25, dim=1).values) and searched_again

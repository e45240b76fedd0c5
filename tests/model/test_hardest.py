import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

from millionway.model import hardest


@given(num=st.integers(2, 60), dim=st.integers(2, 6), k=st.integers(1, 59), seed=st.integers(0, 10**6))
def test_equals_sorting_everything(num: int, dim: int, k: int, seed: int) -> None:
    rows = torch.randn(num, dim, generator=torch.Generator().manual_seed(seed))
    k = min(k, num - 1)
    assert hardest.top_k(rows, k, torch.ones(num, dtype=torch.bool)).tolist() == reference.hardest(rows, k)


def test_ties_go_to_the_lower_id() -> None:
    # Forty copies of two directions: more exact ties than the candidates beyond k.
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat(40, 1)
    table = hardest.top_k(rows, 5, torch.ones(80, dtype=torch.bool))
    assert table[0].tolist() == [2, 4, 6, 8, 10]
    assert table[3].tolist() == [1, 5, 7, 9, 11]


def test_does_not_depend_on_blocks(monkeypatch) -> None:
    rows = torch.randn(300, 16)
    alive = torch.ones(300, dtype=torch.bool)
    whole = hardest.top_k(rows, 7, alive)
    monkeypatch.setattr(hardest, "BLOCK_ROWS", 41)
    assert torch.equal(whole, hardest.top_k(rows, 7, alive))
    assert whole.dtype == torch.int32

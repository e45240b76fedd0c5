import reference
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

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
    monkeypatch.setitem(hardest.BLOCK_ROWS, "cpu", 41)
    assert torch.equal(whole, hardest.top_k(rows, 7, alive))
    assert whole.dtype == torch.int32


class _Products(TorchDispatchMode):
    """The sizes of all products."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.sizes.append(result.numel())
        return result


def test_no_product_is_larger_than_a_block(monkeypatch) -> None:
    monkeypatch.setitem(hardest.BLOCK_ROWS, "cpu", 64)
    monkeypatch.setattr(hardest, "ONE_PANEL_BYTES", 0)
    monkeypatch.setattr(hardest, "PANEL_BYTES", 1 << 18)
    rows, alive = clustered(4000), torch.ones(4000, dtype=torch.bool)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a mode sees the thread that it was entered in
    with _Products() as products:
        hardest.top_k(rows, 5, alive)
    torch.set_num_threads(num_threads)
    assert len(products.sizes) > (4000 / 64) ** 2 / 2 and max(products.sizes) <= 64**2


def clustered(num: int, dim: int = 16, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    centers = torch.randn(num // 8, dim, generator=g)
    return centers[torch.randint(len(centers), (num,), generator=g)] + 0.7 * torch.randn(num, dim, generator=g)


def test_bounds_and_blocks_change_nothing(monkeypatch) -> None:
    """Against float64 by brute force, where bounds are guessed, lists overflow and panels are small."""
    rows = clustered(3000)
    rows[100:400] = rows[100] * torch.linspace(0.5, 2, 300)[:, None]  # many duplicates in direction
    alive = torch.ones(3000, dtype=torch.bool)
    alive[::17] = False
    unit = torch.nn.functional.normalize(rows.double())
    cosines = (unit @ unit.T).masked_fill(~alive, -torch.inf).fill_diagonal_(-torch.inf)
    monkeypatch.setattr(hardest, "MIN_SAMPLE_ROWS", 256)
    monkeypatch.setattr(hardest, "PANEL_BYTES", 0)
    for block, panel_bytes in ((512, 1 << 31), (300, 0)):
        monkeypatch.setitem(hardest.BLOCK_ROWS, "cpu", block)
        monkeypatch.setattr(hardest, "ONE_PANEL_BYTES", panel_bytes)
        table = hardest.top_k(rows, 10, alive).long()
        expected = cosines.topk(10, dim=1).values
        assert torch.allclose(cosines.gather(1, table), expected, atol=1e-12)
        assert bool((table.sort(dim=1).values.diff(dim=1) > 0).all())


def test_nearly_collapsed_rows_are_told_apart_by_float32(monkeypatch) -> None:
    """Mean cosine 0.999 and 0.999999: the cosines differ by less than float32 can hold, the rows do not."""
    monkeypatch.setattr(hardest, "MIN_SAMPLE_ROWS", 256)
    searched_alone = []
    one_by_one = hardest._Search.one_by_one
    monkeypatch.setattr(
        hardest._Search, "one_by_one", lambda *args: (searched_alone.append(len(args[1])), one_by_one(*args))
    )
    for spread in (0.03, 0.001):
        g = torch.Generator().manual_seed(0)
        rows = torch.randn(16, generator=g) + spread * 4 * F.normalize(torch.randn(2000, 16, generator=g))
        unit = F.normalize(rows.double())
        cosines = (unit @ unit.T).fill_diagonal_(-torch.inf)
        table = hardest.top_k(rows, 10, torch.ones(2000, dtype=torch.bool))
        assert torch.allclose(cosines.gather(1, table.long()), cosines.topk(10, dim=1).values, rtol=0, atol=1e-15)
    assert max(searched_alone) < 20  # that takes many times as long


def test_rows_without_a_direction_have_cosine_zero() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.1], [-1.0, 0.2], [0.9, 0.1]])
    table = hardest.top_k(rows, 4, torch.ones(5, dtype=torch.bool)).tolist()
    assert table[0] == [4, 1, 3, 2] and table[1] == [0, 2, 3, 4]

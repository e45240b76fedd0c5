import pytest
import torch
import torch.nn.functional as F
from reference import all_neighbors

from millionway.collection import neighbors
from millionway.collection.neighbors import most_similar, nearest
from millionway.model import hardest


def vectors(num: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Of a few kinds, so that some have many near ones."""
    g = torch.Generator().manual_seed(seed)
    kinds = torch.randn(7, dim, generator=g)
    return F.normalize(torch.randn(num, dim, generator=g) + 2 * kinds[torch.randint(7, (num,), generator=g)])


@pytest.mark.parametrize(("num", "k"), [(2, 20), (30, 20), (300, 5), (1000, 20)])
def test_all_neighbors_are_found_in_blocks_of_any_size(num: int, k: int, monkeypatch: pytest.MonkeyPatch):
    unit = vectors(num, 16)
    for block, at_once in ((1024, 1024), (128, 99), (7, 1)):
        monkeypatch.setitem(hardest.BLOCK_ROWS, "cpu", block)
        monkeypatch.setattr(neighbors, "AT_ONCE", at_once)
        near = nearest(unit, k)
        torch.testing.assert_close(near.cosines.double(), all_neighbors(unit, k), atol=1e-6, rtol=0)
        own = (unit[near.places.long()] @ unit[:, :, None])[:, :, 0]
        torch.testing.assert_close(own, near.cosines, atol=1e-6, rtol=0)
        assert all(len(set(line)) == len(line) for line in near.places.tolist())


def test_images_that_are_all_the_same_have_others_as_neighbors():
    near = nearest(F.normalize(torch.ones(300, 8)), 20)
    assert (near.cosines > 0.999).all()
    assert not (near.places == torch.arange(300)[:, None]).any()


def test_one_image_has_no_neighbors():
    assert nearest(torch.ones(1, 1), 20).places.shape == (1, 0)


@pytest.mark.parametrize("one_panel", [True, False])
def test_progress_goes_to_its_end(one_panel: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(hardest.BLOCK_ROWS, "cpu", 20)
    if not one_panel:
        monkeypatch.setattr(hardest, "ONE_PANEL_BYTES", 0)
        monkeypatch.setattr(hardest, "PANEL_BYTES", 0)
    seen, ended = [], []

    def progress(items, total, what):
        for item in items:
            seen.append((item, total, what))
            yield item
        ended.append(total)

    nearest(vectors(100, 8), 3, progress)
    total = 5 if one_panel else 10
    assert seen == [(n, total, "neighbors") for n in range(total)] and ended == [total]


def test_most_similar_is_exact():
    unit, queries = vectors(500, 16), vectors(9, 16, seed=1)
    near = most_similar(queries, unit, 12)
    wanted = (queries @ unit.T).topk(12, dim=1)
    torch.testing.assert_close(near.cosines, wanted.values)
    assert near.places.tolist() == wanted.indices.tolist()
    assert most_similar(queries, unit[:3], 12).places.shape == (9, 3)

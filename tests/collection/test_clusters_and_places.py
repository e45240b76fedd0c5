import numpy as np
import pytest
import torch
import torch.nn.functional as F

from millionway.collection import places as mapping
from millionway.collection.clusters import agreement, central, clusters
from millionway.collection.neighbors import nearest


def blobs(num: int, kinds: int, dim: int, spread: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    labels = draw.integers(kinds, size=num)
    return (draw.normal(size=(kinds, dim))[labels] + spread * draw.normal(size=(num, dim))).astype(np.float32), labels


def test_clusters_are_the_blobs_the_largest_first():
    places, labels = blobs(600, 4, 2, spread=0.01)
    found = clusters(places)
    assert agreement(found, labels) > 0.99
    sizes = np.bincount(found[found >= 0])
    assert len(sizes) == 4
    assert (np.diff(sizes) <= 0).all()


def test_parts_without_any_edge_between_them_are_clusters():
    places = np.repeat(np.array([[0, 0], [1, 0], [0, 1]], np.float32), 40, axis=0)  # many at the same place
    assert len(set(clusters(places).tolist()) - {-1}) == 3


@pytest.mark.parametrize("num", [0, 1, 9, 30])
def test_few_images_have_clusters_too(num: int):
    assert len(clusters(blobs(num, 2, 2)[0])) == num


def test_the_most_central_images_are_the_nearest_to_the_mean():
    unit = F.normalize(torch.tensor([[1.0, 0], [1, 0.1], [1, 0.9], [0, 1], [0.1, 1], [0.5, 1]]))
    assert central(np.array([0, 0, 0, 1, 1, 1]), unit.numpy(), 1) == [[1], [4]]


@pytest.mark.parametrize("with_extra", [True, False])
def test_images_of_a_kind_are_placed_together(with_extra: bool, monkeypatch: pytest.MonkeyPatch):
    if with_extra:
        pytest.importorskip("openTSNE")
    else:
        monkeypatch.setattr(mapping, "find_spec", lambda name: None)
    vectors, labels = blobs(300, 3, 8)
    unit = F.normalize(torch.from_numpy(vectors))
    found = mapping.places(unit, nearest(unit), 1)
    assert found.shape == (300, 2)
    assert np.abs(found).max() == 1
    distances = np.linalg.norm(found[:, None] - found[None], axis=2)
    same = labels[:, None] == labels[None]
    assert distances[same].mean() < 0.3 * distances[~same].mean()


@pytest.mark.parametrize("num", [1, 2, 3, 50])
def test_images_that_cannot_be_told_apart_stand_side_by_side(num: int):
    unit = F.normalize(torch.ones(num, 4))
    found = mapping.places(unit, nearest(unit), 1)
    assert np.isfinite(found).all()
    assert len(np.unique(found, axis=0)) == num

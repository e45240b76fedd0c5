import numpy as np
import torch
import torch.nn.functional as F

from millionway.collection.neighbors import nearest
from millionway.collection.outliers import outliers, reach, robust


def ordinary(num: int) -> tuple[torch.Tensor, dict[str, np.ndarray], np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    unit = F.normalize(torch.tensor(draw.normal(size=(num, 8)) * 0.15 + np.eye(8)[0], dtype=torch.float32))
    pixels = {name: draw.normal(0.5, 0.05, num) for name in ("brightness", "contrast", "color")}
    return unit, pixels, np.full(num, 640), np.full(num, 480)


def test_reasons_name_what_is_strange():
    unit, pixels, width, height = ordinary(400)
    unit[0] = -unit[1:].mean(dim=0)
    pixels["brightness"][1], pixels["contrast"][2], pixels["color"][3] = 0.0, 0.001, 0.0
    width[4], height[4] = 40, 30
    width[5], height[5] = 4000, 77
    found = outliers(unit, nearest(unit), pixels, width, height)
    assert found.reason[0].startswith("far from everything")
    assert "darker" in found.reason[1]
    assert "nearly uniform" in found.reason[2]
    assert "less color" in found.reason[3]
    assert "smaller" in found.reason[4]
    assert "wider" in found.reason[5]
    assert set(np.argsort(-found.score)[:12].tolist()) >= set(range(6))
    assert all(words.startswith("a little of several things, most of all ") for words in found.mostly)
    assert sum(reason != "" for reason in found.reason[6:]) < 8


def test_a_handful_of_strange_images_does_not_keep_each_other_company():
    unit, pixels, width, height = ordinary(1000)
    unit[:8] = F.normalize(torch.eye(8)[5] + 0.01 * torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    found = outliers(unit, nearest(unit), pixels, width, height)
    assert set(np.argsort(-found.score)[:8].tolist()) == set(range(8))


def test_images_that_are_all_alike_are_not_strange():
    pixels = {name: np.full(50, 0.5) for name in ("brightness", "contrast", "color")}
    unit = F.normalize(torch.ones(50, 4))
    found = outliers(unit, nearest(unit), pixels, np.full(50, 8), np.full(50, 8))
    assert (found.score < 0.01).all()
    assert found.reason == [""] * 50
    assert found.mostly == [""] * 50


def test_one_image_and_images_that_could_not_be_read_have_a_score():
    pixels = {name: np.array([np.nan]) for name in ("brightness", "contrast", "color")}
    assert outliers(torch.ones(1, 1), nearest(torch.ones(1, 1)), pixels, np.zeros(1), np.zeros(1)).score.tolist() == [0]


def test_robust_deviations_do_not_depend_on_a_few():
    values = np.r_[np.random.default_rng(0).normal(size=1000), [1e6] * 20]
    assert robust(values)[:1000].std() < 1.3
    assert robust(values)[-1] > 1e5


def test_a_small_group_apart_reaches_few_images():
    draw = torch.Generator().manual_seed(0)
    group = torch.eye(8)[5] + 0.01 * torch.randn(40, 8, generator=draw)
    unit = F.normalize(torch.cat([group, torch.randn(1000, 8, generator=draw)]))
    found = reach(nearest(unit))
    assert found[:40].max() < np.quantile(found[40:], 0.05)
    assert reach(nearest(torch.ones(1, 1))).tolist() == [1]

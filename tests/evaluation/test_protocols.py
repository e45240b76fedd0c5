import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from millionway.data.dataset import open_dataset
from millionway.evaluation.features import labeled_split
from millionway.evaluation.health import effective_rank, health_of_rows
from millionway.evaluation.knn import knn, votes
from millionway.evaluation.linear import linear
from millionway.evaluation.neighbor_samples import neighbors
from millionway.model.classifier import InstanceClassifier


@pytest.fixture(scope="module")
def features():
    """(bank, bank labels, queries, query labels): the digits' own pixels, which are features of a kind."""
    dataset = open_dataset("digits")
    split = labeled_split(dataset, None, seed=0)
    assert split is not None
    pixels = torch.from_numpy(dataset.source.pixels).float().flatten(1)  # pyright: ignore[reportAttributeAccessIssue]
    return tuple(part for each in (split.bank, split.queries) for part in (pixels[each.instance_ids], each.labels))


@pytest.mark.parametrize("k", [1, 20, 200])
def test_knn_is_scikit_learns(features, k: int) -> None:
    bank, bank_labels, queries, _ = features
    ours = votes(bank.double(), bank_labels, queries.double(), (k, 7))[k]
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
    model = KNeighborsClassifier(k, weights=lambda d: np.exp((1 - d) / 0.1), metric="cosine", algorithm="brute")
    model.fit(unit(bank.double().numpy()), bank_labels.numpy())
    theirs = model.predict(unit(queries.double().numpy()))
    assert (ours.numpy() == theirs).mean() > 0.999


def test_knn_takes_all_of_a_small_bank(features) -> None:
    bank, bank_labels, queries, query_labels = features
    numbers = dict(knn(bank[:30], bank_labels[:30], queries, query_labels))
    assert set(numbers) == {"knn_20", "knn_200"} and all(0.1 < value <= 1 for value in numbers.values())


def test_linear_is_near_scikit_learns(features) -> None:
    bank, bank_labels, queries, query_labels = features
    numbers = dict(linear(bank, bank_labels, queries, query_labels))
    unit = lambda x: (x / x.norm(dim=1, keepdim=True)).numpy()
    model = LogisticRegression(C=1000.0, max_iter=2000).fit(unit(bank), bank_labels.numpy())
    theirs = model.score(unit(queries), query_labels.numpy())
    assert abs(numbers["linear_top1"] - theirs) < 0.02 and numbers["linear_top5"] > numbers["linear_top1"] > 0.9


def test_held_out_part_is_balanced_seeded_and_disjoint() -> None:
    dataset = open_dataset("digits")
    split, again, other = (labeled_split(dataset, None, seed) for seed in (0, 0, 1))
    assert split and again and other
    asked, answered = set(split.queries.instance_ids.tolist()), set(split.bank.instance_ids.tolist())
    assert not asked & answered and len(asked | answered) == 1797
    counts = torch.bincount(split.queries.labels)
    assert int(counts.max() - counts.min()) <= 2 and abs(len(asked) - 359) < 5
    assert torch.equal(split.queries.instance_ids, again.queries.instance_ids)
    assert not torch.equal(split.queries.instance_ids, other.queries.instance_ids)
    assert abs(split.chance - 0.1) < 0.01
    limited = labeled_split(dataset, None, 0, max_images=100)
    assert limited and len(limited.bank.instance_ids) == len(limited.queries.instance_ids) == 100


def test_folders_named_train_and_test_are_the_split(tmp_path, digit_folder) -> None:
    import shutil

    for part in ("train", "test"):
        shutil.copytree(digit_folder, tmp_path / part)
    split = labeled_split(open_dataset(str(tmp_path)), None, 0)
    assert split and len(split.bank.instance_ids) == len(split.queries.instance_ids) == 120
    shutil.copytree(digit_folder, tmp_path / "val")  # beside a test split it is for choices, so for training here
    split = labeled_split(open_dataset(str(tmp_path)), None, 0)
    assert split and len(split.bank.instance_ids) == 240 and len(split.queries.instance_ids) == 120
    shutil.rmtree(tmp_path / "test")
    split = labeled_split(open_dataset(str(tmp_path)), None, 0)
    assert split and len(split.bank.instance_ids) == len(split.queries.instance_ids) == 120


def test_health_numbers_mean_what_they_say() -> None:
    classifier = InstanceClassifier(40, 8)
    ids = torch.arange(20)
    perfect = dict(health_of_rows(classifier, torch.randn(20, 8), classifier.weight[ids], ids))
    assert perfect["instance_top1"] == perfect["instance_top5"] == 1.0
    assert perfect["positive_cosine"] == pytest.approx(1.0) and perfect["hardest_negative_cosine"] < 0.99
    wrong = dict(health_of_rows(classifier, torch.randn(20, 8), -classifier.weight[ids], ids))
    assert wrong["instance_top1"] == 0.0 and wrong["positive_cosine"] == pytest.approx(-1.0)


def test_effective_rank() -> None:
    assert effective_rank(torch.eye(10)) == pytest.approx(10.0, rel=1e-3)
    assert effective_rank(torch.ones(50, 10)) == pytest.approx(1.0, abs=0.01)


def test_neighbors_begin_with_the_image_itself(digit_folder) -> None:
    dataset = open_dataset(str(digit_folder))
    ids = dataset.instance_ids
    rows = neighbors(dataset, ids, torch.randn(len(ids), 8), dataset.labels)
    assert len(rows) == 10 and all(len(row) == 9 for row in rows)
    for row in rows:
        assert row[0]["cosine"] == 1.0 and len({entry["instance_id"] for entry in row}) == 9
        cosines = [entry["cosine"] for entry in row]
        assert cosines == sorted(cosines, reverse=True) and row[0]["label"] == row[0]["key"].split("/")[0]

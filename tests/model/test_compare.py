import reference
import torch
from classifiers import make

from millionway.model.classifier import InstanceClassifier


def test_classes_ahead_are_counted() -> None:
    classifier = make(50, 8)
    x, ids = torch.randn(30, 8, dtype=torch.float64), torch.randint(50, (30,))
    cosines = reference.unit(x) @ reference.unit(classifier.weight).T
    expected = [sum(float(c) >= float(row[i]) for c in row) - 1 for row, i in zip(cosines, ids)]
    assert classifier.num_ahead(x, ids).tolist() == expected
    # Rows that are all the same tell nothing apart: that is no hit.
    classifier.weight[:] = classifier.weight[0]
    assert classifier.num_ahead(x, ids).tolist() == [49] * 30


def test_the_contracts_name_is_an_alias() -> None:
    assert InstanceClassifier.ranks is InstanceClassifier.num_ahead


def test_own_and_nearest_cosines() -> None:
    classifier = make(50, 8)
    x, ids = torch.randn(30, 8, dtype=torch.float64), torch.randint(50, (30,))
    cosines = reference.unit(x) @ reference.unit(classifier.weight).T
    compared = classifier.compare(x, ids)
    own = torch.arange(30), ids
    assert torch.allclose(compared.own, cosines[own])
    cosines[own] = -torch.inf
    assert torch.allclose(compared.nearest_other, cosines.amax(dim=1))

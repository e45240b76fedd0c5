"""Classifiers that the tests here have in common."""

from unittest import mock

import torch

from millionway.model import classifier as classifier_module
from millionway.model.classifier import InstanceClassifier


def make(num: int, dim: int, tau: float = 0.15, dtype: torch.dtype = torch.float64, seed: int = 0, **options):
    """A classifier with row lengths from 0.1 to 10."""
    classifier = InstanceClassifier(num, dim, tau, storage=dtype, **options)
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(num, dim, generator=g, dtype=torch.float64)
    lengths = 10 ** (2 * torch.rand(num, 1, generator=g, dtype=torch.float64) - 1)
    classifier.set_rows(torch.arange(num), (rows / rows.norm(dim=1, keepdim=True) * lengths).to(dtype))
    return classifier


def blocks_of(rows: int):
    """Cut the rows into blocks of this many."""
    return mock.patch.object(classifier_module, "rows_per_block", lambda batch, device: rows)


def run_steps(classifier: InstanceClassifier, num_steps: int, hardest: torch.Tensor | None = None) -> list[float]:
    g = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(num_steps):
        ids = torch.randint(classifier.num_instances, (16,), generator=g).repeat(2)
        x = torch.randn(32, classifier.dim, generator=g).to(classifier.compute_dtype).requires_grad_()
        loss = classifier(x, ids, hardest, 0.2 if hardest is not None else 0.0)
        classifier.update(0.1)
        losses.append(float(loss.detach()))
    return losses

"""Slow, obvious twins of everything clever."""

import torch
import torch.nn.functional as F
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    """Length 1; vectors shorter than 1e-12 become zero and pass no gradient."""
    norm = x.norm(dim=1, keepdim=True)
    return torch.where(norm < 1e-12, torch.zeros_like(x), x / norm.clamp(min=1e-12))


def loss(rows: Tensor, x: Tensor, ids: Tensor, tau: float, hardest: Tensor | None = None, alpha: float = 0.0) -> Tensor:
    """-mean log( sum_j y_ij e_ij / sum_j e_ij ), all of it in memory."""
    logits = unit(x) @ unit(rows).T / tau
    y = F.one_hot(ids, len(rows)).to(logits.dtype)
    if hardest is not None and alpha > 0:
        y = (1 - alpha) * y
        y.scatter_add_(1, hardest[ids].long(), torch.full(hardest[ids].shape, alpha / hardest.shape[1], dtype=y.dtype))
    return (torch.logsumexp(logits, 1) - torch.logsumexp(logits + y.log(), 1)).mean()


class DenseClassifier:
    """The same method by autograd and torch.optim.SGD."""

    def __init__(self, rows: Tensor, tau: float, momentum: Tensor | None = None) -> None:
        self.rows = rows.clone().requires_grad_()
        self.tau = tau
        self.optimizer = torch.optim.SGD([self.rows], lr=1.0, momentum=0.9, weight_decay=1e-4)
        if momentum is not None:
            self.optimizer.state[self.rows]["momentum_buffer"] = momentum.clone()

    def step(self, x: Tensor, ids: Tensor, lr: float, hardest: Tensor | None, alpha: float) -> tuple[Tensor, Tensor]:
        """(loss, gradient of the embeddings); the rows move."""
        x = x.detach().clone().requires_grad_()
        value = loss(self.rows, x, ids, self.tau, hardest, alpha)
        self.optimizer.zero_grad()
        value.backward()
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        assert x.grad is not None
        return value.detach(), x.grad

    @property
    def momentum(self) -> Tensor:
        return self.optimizer.state[self.rows]["momentum_buffer"]


def hardest(rows: Tensor, k: int) -> list[list[int]]:
    """Sort all others by (cosine, lower id first) in float64."""
    unit_rows = unit(rows.double())
    cosines = (unit_rows @ unit_rows.T).tolist()
    tables = []
    for i, row in enumerate(cosines):
        others = sorted((j for j in range(len(row)) if j != i), key=lambda j: (-row[j], j))
        tables.append(others[:k])
    return tables


def relative_error(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|, Frobenius."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def muon_direction(matrix: torch.Tensor) -> torch.Tensor:
    """Three of Newton and Schulz's steps as they are written down, on the larger side too."""
    x = matrix / matrix.norm()
    for _ in range(3):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def all_neighbors(vectors: Tensor, k: int) -> Tensor:
    """[images, k] cosines of the k most similar others, from all of them at once, in float64."""
    unit = vectors.double() / vectors.double().norm(dim=1, keepdim=True)
    cosines = unit @ unit.T
    cosines.fill_diagonal_(-torch.inf)
    return cosines.topk(min(k, len(unit) - 1), dim=1).values

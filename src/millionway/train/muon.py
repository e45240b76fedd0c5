"""Muon (Jordan et al., 2024): SGD with momentum in which every direction of a layer moves by about as much.

A layer's momentum M = U S V^T is replaced by nearly U V^T: its small singular values, which SGD hardly follows, count
as much as its largest. A convolution is a matrix [outputs, inputs x height x width]. torch.optim.Muon takes no
convolutions, and always computes in bfloat16, for which many processors have no instructions.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.optimizer import ParamsT

A, B, C = 3.4445, -4.7750, 2.0315  # of the odd polynomial that brings singular values near 1 fastest (Jordan)
NUM_ITERATIONS = 3
VECTOR_RATE = 3.0  # of BN's factors and of biases, which take a step of SGD, as a multiple of the matrices' rate


class Muon(torch.optim.Optimizer):
    """Muon for what has two or more axes, SGD with momentum for the rest."""

    def __init__(
        self, params: ParamsT, lr: float, momentum: float, weight_decay: float, products: torch.dtype | None = None
    ) -> None:
        """weight_decay: of the matrices, decoupled: the share of a weight that a step of rate 1 would take away.

        products: what they are computed in; by default the weights' own. In bfloat16 a direction is off by up to 5 %.
        """
        self.products = products
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] (no closure: it is called once)
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                velocity = state["momentum_buffer"].mul_(momentum).add_(parameter.grad)
                if parameter.ndim < 2:
                    parameter.sub_(velocity, alpha=VECTOR_RATE * lr)
                    continue
                # Nesterov's
                ahead = torch.add(parameter.grad, velocity, alpha=momentum, out=torch.empty_like(parameter))
                weight, matrix = _in_memory_order(parameter), _in_memory_order(ahead).flatten(1)
                direction = orthogonalized(matrix, self.products).view(weight.shape)
                # Layers with more outputs than inputs would otherwise change their outputs by less.
                scale = math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1]))
                weight.mul_(1 - lr * group["weight_decay"]).sub_(direction, alpha=lr * scale)


def _in_memory_order(weight: Tensor) -> Tensor:
    """[outputs, height, width, inputs] of a convolution in channels-last: which column of its matrix comes first makes
    no difference to the direction, and nothing has to be copied."""
    is_channels_last = weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    return weight.permute(0, 2, 3, 1) if is_channels_last else weight


def orthogonalized(
    matrix: Float[Tensor, "rows columns"], products: torch.dtype | None = None
) -> Float[Tensor, "rows columns"]:
    """Nearly U V^T of U S V^T: three steps X <- (A + B X X^T + C (X X^T)^2) X from X = matrix / |matrix|.

    X X^T is a polynomial of G, that of the first X, and so is P in X = P matrix: only small squares are multiplied, and
    twice the matrix itself.
    """
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalized(matrix.T, products).T
    length = matrix.norm().clamp(min=1e-7)
    narrow = matrix.to(products or matrix.dtype)
    gram = (narrow @ narrow.T).div_(length.square())
    factor = _polynomial(gram)  # P after the first step
    for _ in range(NUM_ITERATIONS - 1):
        factor = factor @ _polynomial(gram @ (factor @ factor))
    return (factor.div_(length) @ narrow).to(matrix.dtype)


def _polynomial(gram: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    out = torch.addmm(gram, gram, gram, beta=B, alpha=C)
    out.diagonal().add_(A)
    return out

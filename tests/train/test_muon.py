import pytest
import torch
from reference import muon_direction
from torch import nn

from millionway.train.muon import VECTOR_RATE, Muon, orthogonalized


@pytest.mark.parametrize("shape", [(5, 5), (4, 30), (30, 4), (1, 7), (7, 1)])
def test_the_direction_is_that_of_the_steps_written_down(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(orthogonalized(matrix), muon_direction(matrix), atol=1e-9)


def test_small_singular_values_count_as_much_as_large_ones() -> None:
    g = torch.Generator().manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(8, 8, generator=g))
    v, _ = torch.linalg.qr(torch.randn(20, 8, generator=g))
    values = torch.logspace(0, -1, 8)
    found = torch.linalg.svdvals(orthogonalized(u @ values.diag() @ v.T))
    assert values.max() / values.min() > 9 and found.max() / found.min() < 2.5
    assert torch.equal(orthogonalized(torch.zeros(3, 4)), torch.zeros(3, 4))


@pytest.mark.parametrize("shape", [(5, 5), (40, 300), (300, 40)])
def test_in_bfloat16_the_direction_is_nearly_the_same(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact, found = orthogonalized(matrix), orthogonalized(matrix, torch.bfloat16)
    assert found.dtype == torch.float32 and not torch.equal(found, exact)
    assert (found - exact).norm() < 0.05 * exact.norm()


def test_a_step_of_a_convolution_and_of_a_vector() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 2).double()
    layer.weight.data = layer.weight.data.to(memory_format=torch.channels_last)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()  # pyright: ignore
    optimizer = Muon(layer.parameters(), 0.1, 0.9, 0.01)
    velocity = torch.zeros_like(weight)
    bias_velocity = torch.zeros_like(bias)
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.randn(2, 3, 5, 5, dtype=torch.float64)).square().sum().backward()
        grad, bias_grad = layer.weight.grad.clone(), layer.bias.grad.clone()  # pyright: ignore
        optimizer.step()
        velocity = 0.9 * velocity + grad
        bias_velocity = 0.9 * bias_velocity + bias_grad
        direction = muon_direction((grad + 0.9 * velocity).flatten(1)).view_as(weight)
        weight = (1 - 0.1 * 0.01) * weight - 0.1 * direction
        bias = bias - 0.1 * VECTOR_RATE * bias_velocity
        assert torch.allclose(layer.weight, weight, atol=1e-9)
        assert torch.allclose(layer.bias, bias)  # pyright: ignore


def test_what_has_no_gradient_stays() -> None:
    layer = nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    Muon(layer.parameters(), 0.1, 0.9, 0.1).step()
    assert torch.equal(layer.weight, before)

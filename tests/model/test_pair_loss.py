import torch
import torch.nn.functional as F

from millionway.model.pair_loss import pair_loss


def test_two_views_are_simclrs_loss() -> None:
    x = torch.randn(10, 6, dtype=torch.float64)
    unit = F.normalize(x)
    logits = (unit @ unit.T / 0.2).fill_diagonal_(-torch.inf)
    expected = F.cross_entropy(logits, torch.arange(10).roll(5))
    assert torch.allclose(pair_loss(x, torch.arange(5).repeat(2), 0.2), expected)


def test_of_more_views_each_other_one_counts_alike_whatever_the_order() -> None:
    x, ids = torch.randn(12, 6, dtype=torch.float64), torch.arange(4).repeat(3)
    unit = F.normalize(x)
    expected = torch.tensor(0.0, dtype=torch.float64)
    for view in range(12):
        others = [other for other in range(12) if other != view]
        log_probabilities = F.log_softmax(unit[others] @ unit[view] / 0.1, dim=0)
        expected -= log_probabilities[ids[others] == ids[view]].mean() / 12
    order = torch.randperm(12)
    assert torch.allclose(pair_loss(x, ids, 0.1), expected)
    assert torch.allclose(pair_loss(x[order], ids[order], 0.1), expected)


def test_the_gradient_is_right() -> None:
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: pair_loss(x, torch.arange(3).repeat(2), 0.3), (x,))

import pytest
import torch
from torch import nn

from millionway.model.classifier import InstanceClassifier
from millionway.model.prior import PriorProgress, write_prior


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def batches(num: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(10, 5, generator=g) + 3, torch.arange(10 * i, 10 * i + 10)) for i in range(num)]


def write(mode: str, row_norm: float | None = None) -> tuple[InstanceClassifier, nn.Module, float]:
    net, classifier = network(), InstanceClassifier(60, 4)
    return classifier, net, write_prior(mode, net, classifier, batches(), row_norm, PriorProgress())


def test_fixed_bn_is_the_network_in_eval_mode() -> None:
    classifier, net, _ = write("fixed-bn")
    with torch.no_grad():
        assert torch.allclose(classifier.weight, net.eval()(torch.cat([x for x, _ in batches()])), atol=1e-6)
    assert net[1].num_batches_tracked == 0


def test_batch_bn_normalizes_with_each_batch_and_moves_the_statistics() -> None:
    classifier, net, _ = write("batch-bn")
    twin = network().train()
    with torch.no_grad():
        expected = torch.cat([twin(x) for x, _ in batches()])
    assert torch.equal(classifier.weight, expected)
    assert torch.equal(net[1].running_mean, twin[1].running_mean)


def test_running_bn_normalizes_with_the_averages_as_they_move() -> None:
    classifier, net, _ = write("running-bn")
    twin = network().eval()
    mean, var, rows = torch.zeros(8), torch.ones(8), []
    with torch.no_grad():
        for x, _ in batches():
            h = twin[0](x)
            mean = 0.9 * mean + 0.1 * h.mean(0)
            var = 0.9 * var + 0.1 * h.var(0)
            rows.append(twin[3](((h - mean) / torch.sqrt(var + 1e-5)).relu()))
    assert torch.allclose(classifier.weight, torch.cat(rows), atol=1e-5)
    assert torch.allclose(net[1].running_mean, mean, atol=1e-6)
    assert net.training and net[1].training and not net[1]._forward_pre_hooks


def test_random_rows_have_the_length_of_features() -> None:
    classifier, _, norm = write("random")
    features, _, _ = write("batch-bn")
    assert torch.allclose(classifier.weight.norm(dim=1), features.weight.norm(dim=1).mean().expand(60))
    assert abs(norm - float(features.weight.norm(dim=1).mean())) < 1e-6


def test_row_norm_overrides_the_length() -> None:
    for mode in ("random", "batch-bn"):
        classifier, _, _ = write(mode, row_norm=2.5)
        assert torch.allclose(classifier.weight.norm(dim=1), torch.full((60,), 2.5))


@pytest.mark.parametrize("mode", ["random", "running-bn"])
def test_a_pass_in_two_parts_is_one_pass(mode: str) -> None:
    whole, net_whole, length = write(mode)
    net, some = network(), InstanceClassifier(60, 4)
    progress = PriorProgress()
    every = batches()
    write_prior(mode, net, some, every[:2], None, progress)
    half = progress.batches
    got = write_prior(mode, net, some, every[2:], None, progress)
    assert (half, progress.batches, progress.rows) == (2, len(every), sum(len(ids) for _, ids in every))
    assert got == pytest.approx(length, rel=1e-6)
    torch.testing.assert_close(some.weight, whole.weight)
    for a, b in zip(net.state_dict().values(), net_whole.state_dict().values()):
        assert torch.equal(a, b)

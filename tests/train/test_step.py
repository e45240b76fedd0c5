import copy

import pytest
import torch
from torch import nn

from millionway.model.classifier import InstanceClassifier
from millionway.train.step import train_step


class Small(nn.Module):
    """Convolution, perhaps BN, dropout, and a head."""

    def __init__(self, bn: bool, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6) if bn else nn.Identity(), nn.ReLU(), nn.Dropout(dropout)]
        self.encoder = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(6, 8)

    def forward(self, views: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(views))


def step(model: Small, views_at_once: int | None, views: torch.Tensor) -> tuple[Small, InstanceClassifier, float]:
    model = copy.deepcopy(model)
    classifier = InstanceClassifier(20, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, 0.9)
    torch.manual_seed(5)
    result = train_step(
        model,
        classifier,
        optimizer,
        views,
        torch.arange(6).repeat(2),
        None,
        alpha=0.0,
        lr=0.5,
        row_lr=0.5,
        momentum=0.9,
        weight_decay=1e-4,
        views_at_once=views_at_once,
    )
    return model, classifier, float(result.loss)


def test_micro_batches_are_the_whole_batch_where_there_is_no_bn() -> None:
    model, views = Small(bn=False), torch.randn(12, 3, 8, 8)
    whole, rows, loss = step(model, None, views)
    for views_at_once in (1, 5, 12):
        parts, part_rows, part_loss = step(model, views_at_once, views)
        assert part_loss == pytest.approx(loss, rel=1e-6)
        assert torch.allclose(rows.weight, part_rows.weight, atol=1e-6)
        for a, b in zip(whole.parameters(), parts.parameters()):
            assert torch.allclose(a, b, atol=1e-6)


def test_micro_batches_move_bn_statistics_once() -> None:
    model, views = Small(bn=True), torch.randn(12, 3, 8, 8)
    parts, _, _ = step(model, 4, views)
    expected = copy.deepcopy(model)
    for part in views.split(4):
        expected(part)
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffer, dict(parts.named_buffers())[name]), name


def test_dropout_does_the_same_both_times() -> None:
    """With it, the gradient belongs to the embeddings that the classifier saw: one part is the whole batch."""
    model, views = Small(bn=False, dropout=0.3), torch.randn(12, 3, 8, 8)
    seen: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.detach().clone()))
    step(model, 4, views)
    assert len(seen) == 6
    for first, second in zip(seen[:3], seen[3:]):
        assert torch.equal(first, second)


@pytest.mark.parametrize("views_at_once", [None, 4])
def test_the_rows_are_told_of_the_first_views_alone(views_at_once: int | None) -> None:
    """The others learn from finding each other, and no row hears of them."""
    torch.manual_seed(1)
    views, ids = torch.randn(12, 3, 8, 8), torch.arange(6).repeat(2)
    rates = {"lr": 0.0, "row_lr": 0.5, "momentum": 0.9, "weight_decay": 1e-4}
    moved = []
    for num, pairs in ((6, 2.0), (None, 0.0)):
        model, classifier = Small(bn=False), InstanceClassifier(20, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        some = slice(0, 12 if num else 6)
        result = train_step(
            model,
            classifier,
            optimizer,
            views[some],
            ids[some],
            None,
            alpha=0.0,
            pairs=pairs,
            num_classified=num,
            with_num_ahead=True,
            views_at_once=views_at_once,
            **rates,
        )
        assert result.num_ahead is not None and len(result.num_ahead) == 6
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        moved.append((classifier.weight.clone(), float(result.loss), gradients))
    (rows, loss, gradients), (expected_rows, expected_loss, plain_gradients) = moved
    assert torch.allclose(rows, expected_rows, atol=1e-6) and loss == pytest.approx(expected_loss, rel=1e-6)
    assert any(not torch.allclose(a, b, atol=1e-4) for a, b in zip(gradients, plain_gradients))

import pytest
import torch

from millionway.model import classifier as classifier_module
from millionway.model import softmax
from millionway.model.classifier import InstanceClassifier
from millionway.model.rows import Rows


def test_bfloat16_rows_keep_small_updates_on_average() -> None:
    """Updates of a 2^-11th of the value: plain rounding loses all of them."""
    value, update = 1.0, 2.0**-11
    stored = torch.full((400, 64), value, dtype=torch.bfloat16)
    rows = Rows(stored, torch.zeros_like(stored), torch.zeros(400, 1), 400)
    plain = rows.weight.clone()
    for step in range(64):
        rows.velocity.fill_(-update)
        move = softmax.Move(lr=1.0, momentum=1.0, weight_decay=0.0, key=1000 * step)
        room = softmax.Room.of(rows, rows.blocks(), torch.float32, torch.float32, move.key)
        room.gradient.zero_()
        move(rows.blocks()[0], room)
        plain = (plain.float() + update).to(torch.bfloat16)
    expected = value + 64 * update
    assert float(plain.float().mean()) == value
    assert abs(float(rows.weight.float().mean()) - expected) < 0.05 * 64 * update
    assert rows.weight.float().std() > 0  # each number is rounded by its own chance


def test_the_noise_of_a_row_does_not_depend_on_what_is_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, ids, written = torch.randn(6, 16), torch.arange(6), []
    for rows_per_block, at_once in ((256, 1 << 16), (8, 20), (8, 1)):
        monkeypatch.setattr(classifier_module, "rows_per_block", lambda batch, device, num=rows_per_block: num)
        monkeypatch.setattr(softmax, "NOISE_ROWS_AT_ONCE", at_once)
        classifier = InstanceClassifier(350, 16, storage=torch.bfloat16, seed=1)
        classifier(x.clone().requires_grad_(), ids).backward()
        classifier.update(0.5)
        written.append((classifier.weight.clone(), classifier.momentum.clone()))
    for rows, momentum in written[1:]:
        # Sums in other blocks differ in their last bits, which now and then rounds the other way.
        assert (rows != written[0][0]).float().mean() < 1e-3
        assert (momentum != written[0][1]).float().mean() < 1e-3


def test_rows_that_nobody_asks_for() -> None:
    rows = Rows(torch.randn(5, 3), torch.zeros(5, 3), torch.ones(5, 1), 5)
    assert rows.gather(torch.empty(0, dtype=torch.int64)).shape == (0, 3)
    assert rows.gather(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, 3)

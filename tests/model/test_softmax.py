import torch

from millionway.model import softmax
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
        room = softmax.Room.of(rows, torch.float32, move.key)
        room.gradient.zero_()
        move(rows.blocks()[0], room)
        plain = (plain.float() + update).to(torch.bfloat16)
    expected = value + 64 * update
    assert float(plain.float().mean()) == value
    assert abs(float(rows.weight.float().mean()) - expected) < 0.05 * 64 * update
    assert rows.weight.float().std() > 0  # each number is rounded by its own chance

"""The best so far of each of some rows, for searches that go through all products block by block.

Nearly all products are below what their row has already, and pass by with one comparison. Those that reach the bound of
their row wait; when enough have come they are sorted in, and raise the bound.
"""

import threading

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

PENDING = 64  # candidates that wait to be sorted in, per row on average


class Best:
    """The `width` best so far, in no order. Several threads may add to it."""

    def __init__(self, num_rows: int, width: int, like: Tensor) -> None:
        """All that stays for long is allocated here, before anything is computed, and written in place: between pieces
        that come and go it would leave holes of many times its size. like: floats on the device of the search."""
        self.scores = like.new_full((num_rows, width), -torch.inf)
        self.ids = torch.zeros(num_rows, width, dtype=torch.int32, device=like.device)
        self.bound = like.new_full((num_rows,), -torch.inf)
        room = PENDING * num_rows
        self.waiting_rows = torch.empty(room, dtype=torch.int16, device=like.device)
        self.waiting_ids = torch.empty(room, dtype=torch.int32, device=like.device)
        self.waiting_scores = like.new_empty(room)
        self.num_waiting = 0
        self.lock = threading.Lock()

    @staticmethod
    def row_bytes(width: int) -> int:
        """Of a row: its best so far, and what waits."""
        return 8 * width + 10 * PENDING

    def add(self, row: Int[Tensor, " n"], ids: Int[Tensor, " n"], scores: Float[Tensor, " n"]) -> None:
        with self.lock:
            while len(row):
                free = slice(self.num_waiting, min(self.num_waiting + len(row), len(self.waiting_rows)))
                num = free.stop - free.start
                self.waiting_rows[free], self.waiting_ids[free] = row[:num], ids[:num]
                self.waiting_scores[free] = scores[:num]
                self.num_waiting = free.stop
                if self.num_waiting == len(self.waiting_rows):
                    self.sort_in()
                row, ids, scores = row[num:], ids[num:], scores[num:]

    def sort_in(self) -> None:
        """Those that wait join the best, and these raise the bound."""
        if self.num_waiting == 0:
            return
        row, ids, scores = (
            each[: self.num_waiting] for each in (self.waiting_rows, self.waiting_ids, self.waiting_scores)
        )
        self.num_waiting = 0
        order = _stable_order(row)
        row = row[order].long()
        num = torch.bincount(row, minlength=len(self.bound))
        slot = torch.arange(len(row), device=row.device) - torch.index_select(num.cumsum(0) - num, 0, row)
        width, more = self.scores.shape[1], int(num.amax())
        wide, wide_ids = F.pad(self.scores, (0, more), value=-torch.inf), F.pad(self.ids, (0, more))
        flat = row * (width + more) + width + slot
        wide.view(-1)[flat] = scores[order]
        wide_ids.view(-1)[flat] = ids[order]
        best, places = wide.topk(width, dim=1, sorted=False)
        self.scores.copy_(best)
        self.ids.copy_(wide_ids.gather(1, places))
        torch.maximum(self.bound, self.bound_from(self.scores.amin(dim=1)), out=self.bound)

    def bound_from(self, last: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """What a further candidate has to reach, if the last of the best has this score."""
        return last

    def order(self) -> None:
        """Best first."""
        self.sort_in()
        ordered, order = self.scores.sort(dim=1, descending=True)
        self.scores.copy_(ordered)
        self.ids.copy_(self.ids.gather(1, order))


def product(a: Float[Tensor, "n dim"], b: Float[Tensor, "m dim"], memory: Float[Tensor, " space"]) -> Tensor:
    """a b^T [n, m], in memory that is used again for each block."""
    return torch.mm(a, b.T, out=memory[: len(a) * len(b)].view(len(a), len(b)))


def reaching(
    scores: Float[Tensor, "rows columns"], bound: Float[Tensor, " bounds"], by_column: bool = False
) -> tuple[Int[Tensor, " found"], Int[Tensor, " found"], Float[Tensor, " found"]]:
    """(row, column, score) where the bound is reached, one for each row or each column."""
    reached = (scores >= (bound[None, :] if by_column else bound[:, None])).view(-1)
    if scores.device.type == "cpu":  # numpy needs an eighth of the time
        found = torch.from_numpy(np.flatnonzero(reached.numpy()))
    else:
        found = reached.nonzero()[:, 0]
    row = found // scores.shape[1]
    return row, found - row * scores.shape[1], torch.index_select(scores.view(-1), 0, found)


def _stable_order(keys: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """On a CPU numpy sorts 16-bit numbers by their digits."""
    if keys.device.type != "cpu":
        return keys.argsort(stable=True)
    return torch.from_numpy(np.argsort(keys.numpy(), kind="stable"))

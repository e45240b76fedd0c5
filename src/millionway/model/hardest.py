"""Exact top-K among rows, by cosine. Never [classes, classes] in memory.

A bound per row, known before the search, lets nearly all products pass by with one comparison:

1. A lower bound of each row's K-th best cosine. From an earlier table it is certain: its neighbors, scored again.
   Without one it is a guess from a sample of the rows, checked at the end.
2. All products, block by block. A block serves its rows and its columns, so half of them are enough. What reaches the
   bound goes into a short list per row. Rows are sorted by their bound, so that one number serves a whole block.
3. Each list is ordered by (cosine, lower id); where float32 cannot tell, in float64. A row whose list is too short (the
   guess was too high) or too long (many duplicates) is searched alone.

The result does not depend on blocks, bounds or guesses.
"""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK_ROWS = 2048
ROUNDING = 2e-6  # two float32 cosines that differ by more are in the same order in float64
MARGIN = 1e-5  # what is nearer to the K-th than this is told apart in float64
SAMPLE_ROWS = 4096
MAX_LIST_BYTES = 1 << 31  # beyond it the search goes panel by panel, with all products instead of half of them


def top_k(
    rows: Float[Tensor, "classes dim"],
    k: int,
    alive: Bool[Tensor, " classes"],
    earlier: Int[Tensor, "classes _"] | None = None,
) -> Int[Tensor, "classes k"]:
    """Ids of the k most similar other rows, most similar first, ties by lower id; dead rows left out.

    earlier: a table of the same rows from before they moved; the result is the same, sooner.
    """
    unit = F.normalize(rows.float(), eps=1e-12)
    bounds = _bounds_from_sample(unit, k, alive) if earlier is None else _bounds_from_table(unit, k, alive, earlier)
    return _Search(rows, unit, k, alive, bounds - MARGIN).run()


def _bounds_from_table(unit: Tensor, k: int, alive: Tensor, earlier: Tensor) -> Tensor:
    """The smallest cosine with the earlier neighbors that are alive: at least K rows are that near."""
    if earlier.shape[1] < k:
        return _bounds_from_sample(unit, k, alive)
    parts = []
    for start in range(0, len(unit), BLOCK_ROWS):
        ids = earlier[start : start + BLOCK_ROWS, :k].long()
        near = torch.index_select(unit, 0, ids.flatten()).view(*ids.shape, -1)
        cosines = torch.bmm(near, unit[start : start + BLOCK_ROWS, :, None])[:, :, 0]
        # No bound for a row that has lost a neighbor: its list will be too long, and it is searched alone.
        parts.append(torch.where(alive[ids].all(dim=1), cosines.amin(dim=1), -2.0))
    return torch.cat(parts)


def _bounds_from_sample(unit: Tensor, k: int, alive: Tensor) -> Tensor:
    """From every n-th row: the cosine that about 2.5 K of all rows reach. May be too high for a few rows."""
    num = len(unit)
    if num <= 8 * k:
        return torch.full((num,), -2.0, device=unit.device)  # everything is a candidate
    sample = torch.arange(0, num, max(1, num // SAMPLE_ROWS), device=unit.device)
    sample = sample[alive[sample]]
    place = min(len(sample), max(8, -(-5 * k * len(sample) // (2 * num))))
    if place == 0:
        return torch.full((num,), -2.0, device=unit.device)
    columns = unit[sample].T.contiguous()
    starts = range(0, num, BLOCK_ROWS)
    return torch.cat([(unit[s : s + BLOCK_ROWS] @ columns).topk(place, dim=1).values[:, -1] for s in starts])


class _Search:
    """Works on the rows in the order of their bounds; `original` says which they are."""

    def __init__(self, rows: Tensor, unit: Tensor, k: int, alive: Tensor, bounds: Tensor) -> None:
        self.rows, self.k, self.num = rows, k, len(rows)
        self.bounds, self.original = bounds.sort(stable=True)
        self.unit, self.alive = unit[self.original], alive[self.original]
        self.all_alive = bool(alive.all())
        self.lowest = self.bounds[::BLOCK_ROWS].tolist()  # of each block
        # Room for a list: the K best, and what a cautious bound lets in besides.
        self.room = min(self.num, 4 * k + 64)

    def run(self) -> Tensor:
        result = torch.empty(self.num, self.k, dtype=torch.int32, device=self.unit.device)
        num_blocks = len(self.lowest)
        cosines = self.unit.new_empty(min(self.num, BLOCK_ROWS) ** 2)
        if 8 * self.num * self.room <= MAX_LIST_BYTES:
            lists = _Lists(0, self.num, self.room, self.unit.device)
            for i in range(num_blocks):
                for j in range(i, num_blocks):
                    self._scan(i, j, lists, cosines, both_ways=i != j)
            self._choose(lists, result)
            return result
        for i in range(num_blocks):
            lists = _Lists(i * BLOCK_ROWS, min((i + 1) * BLOCK_ROWS, self.num), self.room, self.unit.device)
            for j in range(num_blocks):
                self._scan(i, j, lists, cosines, both_ways=False)
            self._choose(lists, result)
        return result

    def _scan(self, i: int, j: int, lists: "_Lists", memory: Tensor, both_ways: bool) -> None:
        """All cosines of block i with block j; those that reach a row's bound go into its list."""
        first, second = i * BLOCK_ROWS, j * BLOCK_ROWS
        a, b = self.unit[first : first + BLOCK_ROWS], self.unit[second : second + BLOCK_ROWS]
        cosines = memory[: len(a) * len(b)].view(len(a), len(b))
        torch.mm(a, b.T, out=cosines)
        lowest = min(self.lowest[i], self.lowest[j]) if both_ways else self.lowest[i]
        found = _nonzero(cosines.view(-1) >= lowest)
        scores = torch.index_select(cosines.view(-1), 0, found)
        row, column = found // len(b) + first, found % len(b) + second
        self._add(lists, row, column, scores)
        if both_ways:
            column, order = column.sort(stable=True)
            self._add(lists, column, row[order], scores[order])

    def _add(self, lists: "_Lists", rows: Tensor, others: Tensor, scores: Tensor) -> None:
        good = (scores >= torch.index_select(self.bounds, 0, rows)) & (rows != others)
        if not self.all_alive:
            good &= self.alive[others]
        good = _nonzero(good)
        lists.add(rows[good], others[good], scores[good])

    def _choose(self, lists: "_Lists", result: Tensor) -> None:
        for start in range(lists.first, lists.last, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, lists.last)
            ids, scores, counts = lists.part(start, stop)
            width = max(self.k, int(counts.clamp(max=self.room).amax()))
            best = self._best(ids[:, :width], scores[:, :width], start)
            for row in (counts > self.room).nonzero()[:, 0].tolist():
                best[row] = self._alone(start + row)
            result[self.original[start:stop]] = best

    def _best(self, ids: Tensor, scores: Tensor, start: int) -> Tensor:
        """The first K of each list: a few more than K by float32; what that leaves open, in float64."""
        width, k = scores.shape[1], self.k
        scores, places = scores.topk(min(k + 8, width), dim=1)
        ids = self.original[ids.gather(1, places).long()]
        best = ids[:, :k].to(torch.int32)
        gaps = scores[:, :-1] - scores[:, 1:]
        unsure = (gaps[:, :k] < ROUNDING).any(dim=1)
        kth = scores[:, k - 1]
        if scores.shape[1] > k:
            unsure |= gaps[:, k - 1] < MARGIN
        unsure = unsure.nonzero()[:, 0]
        for part in unsure.split(256):
            queries = self.original[start + part]
            best[part] = _order_exactly(self.rows, queries, ids[part], scores[part], k)
        # Searched alone: where the K-th does not clear the bound, so that one outside the list might be nearer by
        # rounding; and where more than the few are as near as the K-th, as among duplicates.
        doubtful = kth < self.bounds[start : start + len(kth)] + MARGIN / 2
        if scores.shape[1] < width:
            doubtful |= (scores[:, -1] >= kth - MARGIN) & ~torch.isinf(scores[:, -1])
        for row in doubtful.nonzero()[:, 0].tolist():
            best[row] = self._alone(start + row)
        return best

    def _alone(self, row: int) -> Tensor:
        """One row against all others, without a bound."""
        cosines = self.unit @ self.unit[row]
        cosines.masked_fill_(~self.alive, -torch.inf)
        cosines[row] = -torch.inf
        near = (cosines >= cosines.topk(self.k).values[-1] - MARGIN).nonzero()[:, 0]
        return _order_exactly(
            self.rows, self.original[row : row + 1], self.original[near][None], cosines[near][None], self.k
        )[0]


class _Lists:
    """For each of the rows first : last, ids and cosines in the order they come; what exceeds the room is counted."""

    def __init__(self, first: int, last: int, room: int, device: torch.device) -> None:
        self.first, self.last, self.room = first, last, room
        # One more place takes what does not fit.
        self.ids = torch.zeros(last - first, room + 1, dtype=torch.int32, device=device)
        self.scores = torch.full((last - first, room + 1), -torch.inf, device=device)
        self.counts = torch.zeros(last - first, dtype=torch.int64, device=device)

    def add(self, rows: Tensor, ids: Tensor, scores: Tensor) -> None:
        """rows: ascending."""
        if len(rows) == 0:
            return
        place = rows - self.first
        num = torch.bincount(place - place[0])  # found per row, from the first row found
        begins = num.cumsum(0) - num
        rank = torch.arange(len(rows), device=rows.device) - torch.index_select(begins, 0, place - place[0])
        slot = (torch.index_select(self.counts, 0, place) + rank).clamp_(max=self.room)
        flat = place * (self.room + 1) + slot
        self.ids.view(-1)[flat] = ids.to(torch.int32)
        self.scores.view(-1)[flat] = scores
        self.counts[place[0] : place[0] + len(num)] += num

    def part(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        here = slice(start - self.first, stop - self.first)
        return self.ids[here, : self.room], self.scores[here, : self.room], self.counts[here]


def _nonzero(mask: Bool[Tensor, " n"]) -> Int[Tensor, " found"]:
    """Ascending places of True. On a CPU numpy finds them three times as fast."""
    return torch.from_numpy(np.flatnonzero(mask.numpy())) if mask.device.type == "cpu" else mask.nonzero()[:, 0]


def _order_exactly(rows: Tensor, queries: Tensor, ids: Tensor, scores: Tensor, k: int) -> Tensor:
    """The first k of the ids by (cosine in float64, lower id), for each query: int32. MPS has no float64."""
    device = torch.device("cpu") if rows.device.type == "mps" else rows.device
    ids, order = ids.long().sort(dim=1)
    left_out = torch.isinf(scores.gather(1, order)).to(device)
    near = F.normalize(rows[ids].to(device, torch.float64), dim=2, eps=1e-12)  # [queries, candidates, dim]
    query = F.normalize(rows[queries].to(device, torch.float64), dim=1, eps=1e-12)
    exact = torch.einsum("qd,qcd->qc", query, near).masked_fill(left_out, -torch.inf)
    best = exact.argsort(dim=1, descending=True, stable=True)[:, :k]
    return ids.gather(1, best.to(ids.device)).to(torch.int32)

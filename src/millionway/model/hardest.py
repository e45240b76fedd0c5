"""Exact top-K among rows, by cosine. Never [classes, classes] in memory, and no second copy of the rows.

1. A guess at a lower bound of each row's K-th best cosine, from a sample of the rows.
2. All products, block by block; nearly all entries pass by with one comparison. What reaches the bound of its row joins
   the row's best so far, and these raise the bound. A block of products serves its rows and its columns, so half of
   them are enough within a panel of rows whose best so far fit into memory.
3. The K best, ordered by (cosine, lower id): where float32 cannot tell, in float64. A row whose bound was too high, or
   with more near-ties than there is room for, as among duplicates, is searched again alone.

The rows of several ranks meet by traveling around the ring of ranks: twice for each panel, and once for what is
searched alone. The result does not depend on ranks, blocks, panels or bounds.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from millionway.model import threads
from millionway.model.best import Best, product, reaching
from millionway.model.cosines import Frame, exact_cosines, first_of_each, float64_device, in_order, rounding
from millionway.model.products import computed_in
from millionway.model.rows import inverse_norms
from millionway.parallel import collectives
from millionway.parallel.group import Group
from millionway.parallel.layout import find_places, local_range

BLOCK_ROWS = {"cpu": 1024}  # 4 MiB of cosines for each core; a GPU wants larger products
BLOCK_ROWS_ELSEWHERE = 8192
BLOCKS_AT_ONCE = 32  # that a thread takes
SAMPLE_EVERY = 64  # one row in so many is in the sample
MIN_SAMPLE_ROWS = 2048
SPARE = 28  # kept besides the K best, so that float64 can choose among near-ties
# For the best so far of a panel's rows, and what waits. If all rows are one panel half of the products are enough.
ONE_PANEL_BYTES = 320 << 20
PANEL_BYTES = 48 << 20
ALONE_AT_ONCE = 64
MAX_ALONE_CANDIDATES = 1 << 20


def top_k(
    rows: Float[Tensor, "classes dim"],
    k: int,
    alive: Bool[Tensor, " classes"],
    group: Group | None = None,
    num_instances: int | None = None,
    progress: Callable[[Iterable, int, str], Iterable] | None = None,
) -> Int[Tensor, "classes k"]:
    """Ids of the k most similar other rows of all ranks, most similar first, ties by lower id; dead rows left out.

    progress: (items, how many, what is done) -> the items, with a bar.
    """
    with computed_in("float32"):
        return _top_k(rows, k, alive, group or Group(), len(rows) if num_instances is None else num_instances, progress)


def _top_k(
    rows: Tensor, k: int, alive: Tensor, group: Group, num_instances: int, progress: Callable | None
) -> Int[Tensor, "classes k"]:
    block = BLOCK_ROWS.get(rows.device.type, BLOCK_ROWS_ELSEWHERE)
    own = _Shard(local_range(num_instances, group.rank, group.size)[0], rows, alive, block)
    search = _Search(own, k, group, num_instances)
    table = torch.empty(len(rows), k, dtype=torch.int32, device=rows.device)
    num_rows = max(1, local_range(num_instances, 0, group.size)[1])  # as many panels on all ranks: rows travel together
    panel_rows = _panel_rows(num_rows, rows.shape[1], k, block)
    panels = [range(first, min(first + panel_rows, len(rows)), block) for first in range(0, num_rows, panel_rows)]
    if progress is not None:
        num_scans = sum(len(_pairs(len(panel))) + (len(panel) if len(panels) > 1 else 0) for panel in panels)
        search.scanned = functools.partial(next, iter(progress(range(num_scans), num_scans, "neighbors")), None)
    alone = [search.run(panel, table) for panel in panels]
    search.scanned()
    search.one_by_one(torch.cat(alone), table)
    return table


def _row_bytes(dim: int, k: int) -> int:
    """Of a row of a panel: its best so far, what waits, and itself."""
    return Best.row_bytes(k + SPARE) + 4 * dim


def _panel_rows(num_rows: int, dim: int, k: int, block: int) -> int:
    fits = num_rows * _row_bytes(dim, k) <= ONE_PANEL_BYTES
    return num_rows if fits else max(1, PANEL_BYTES // _row_bytes(dim, k) // block) * block


def _sample_every(num_instances: int, k: int) -> int:
    return max(1, min(SAMPLE_EVERY, num_instances // max(MIN_SAMPLE_ROWS, 4 * k)))


def search_bytes(num_rows: int, num_instances: int, dim: int, k: int, device: torch.device) -> int:
    """What a search for so many own rows takes beside them: the table that is made, the sample of all, a panel, and a
    block of cosines for each worker with the marks of those that reach their bound."""
    block = BLOCK_ROWS.get(device.type, BLOCK_ROWS_ELSEWHERE)
    sample = num_instances // _sample_every(num_instances, k) * 4 * (dim + 2)
    panel = _panel_rows(num_rows, dim, k, block) * _row_bytes(dim, k)
    working = threads.num_workers(device) * (4 + 1) * min(block, num_rows) ** 2
    return 4 * num_rows * k + sample + panel + working


@dataclass
class _Shard:
    """Some rank's rows while they are here."""

    first_id: int
    rows: Tensor
    alive: Tensor
    block: int

    def starts(self) -> range:
        """Of the blocks."""
        return range(0, len(self.rows), self.block)

    def part(self, start: int) -> slice:
        return slice(start, start + self.block)

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return find_places(ids, self.first_id, self.first_id + len(self.rows))


class _Best(Best):
    """The best so far of a block of own rows."""

    def __init__(self, start: int, num_rows: int, k: int, like: Float[Tensor, "n lifted"]) -> None:
        """like: other lifted rows."""
        super().__init__(num_rows, k + SPARE, like)
        self.start, self.k = start, k
        self.lifted = like.new_empty(num_rows, like.shape[1])
        self.first_bound = like.new_empty(num_rows)

    def bound_from(self, last: Tensor) -> Tensor:
        return last - rounding(self.lifted[:, -1], last)

    def finish(self) -> None:
        """Find what is too close for float32, for `score` and `write`."""
        self.order()
        k = self.k
        kth, apart = self.scores[:, k - 1 : k], rounding(self.lifted[:, -1:], self.scores[:, k - 1 : k])
        near_next = F.pad(self.scores[:, :-1] - self.scores[:, 1:] < apart, (1, 1))
        close = near_next[:, :-1] | near_next[:, 1:] | ((self.scores - kth).abs() < apart)
        close[:, k - 1] &= close.sum(dim=1) > 1  # the k-th is near itself
        # Rows that may have more near-ties than are here, or whose first bound was too high.
        self.alone = (self.scores[:, -1:] >= kth - apart)[:, 0] | ((kth - apart)[:, 0] < self.first_bound)
        self.close = (close & ~self.alone[:, None]).nonzero()
        self.exact = torch.zeros(len(self.close), dtype=torch.float64, device=float64_device(self.scores))

    def score(self, own: "_Shard", shard: "_Shard") -> None:
        """In float64, those whose rows are in the shard."""
        row, column = self.close.T
        places, here = shard.places(self.ids[row, column])
        here = here.nonzero()[:, 0]
        if len(here):
            exact = exact_cosines(own.rows, self.start + row[here], shard.rows, places[here])
            self.exact[here.to(exact.device)] = exact - 1

    def write(self, table: Tensor) -> None:
        """The k best, in order."""
        row, column = self.close.T.to(self.exact.device)
        rows, row = row.unique(return_inverse=True)
        scores = self.scores[rows.to(self.scores.device)].to(self.exact.device, torch.float64)
        scores[row, column] = self.exact
        rows = rows.to(self.ids.device)
        self.ids[rows] = in_order(self.ids[rows].to(scores.device), scores).to(self.ids.device)
        table[self.start : self.start + len(self.ids)] = self.ids[:, : self.k]


class _Search:
    """This rank's rows among those of all ranks."""

    def __init__(self, own: _Shard, k: int, group: Group, num_instances: int) -> None:
        self.own, self.k, self.group, self.num_instances = own, k, group, num_instances
        self.device = own.rows.device
        self.scanned: Callable[[], object] = lambda: None  # called after each scan
        self.all_alive = not collectives.any_rank(group, not bool(own.alive.all()))
        self.frame = Frame(self._mean())
        sampled = torch.arange(0, num_instances, _sample_every(num_instances, k), device=self.device)
        places, here = own.places(sampled)
        places = places[here]
        sample = collectives.all_gather_uneven(group, own.rows[places[own.alive[places]]])
        self.sample = self.frame.keys(self.frame.lift(sample))

    def run(self, starts: range, table: Tensor) -> Int[Tensor, " alone"]:
        """Fill the rows of these blocks in the table. Returns the places of rows that have to be searched alone."""
        size = len(self.own.rows)
        panel = {start: _Best(start, min(self.own.block, size - start), self.k, self.sample) for start in starts}
        threads.on_each(self._bound, panel.values(), self.device)
        for shard in self._ring():
            is_own = shard.rows is self.own.rows
            if is_own:
                self._among_themselves(panel)
            self._with(shard, panel, [start for start in shard.starts() if not (is_own and start in panel)])
        threads.on_each(_Best.finish, panel.values(), self.device)
        for shard in self._ring():
            threads.on_each(functools.partial(_Best.score, own=self.own, shard=shard), panel.values(), self.device)
        threads.on_each(functools.partial(_Best.write, table=table), panel.values(), self.device)
        alone = [start + best.alone.nonzero()[:, 0] for start, best in panel.items()]
        return torch.cat([torch.empty(0, dtype=torch.int64, device=self.device), *alone])

    def _ring(self) -> Iterator[_Shard]:
        """Everybody's rows, our own first."""
        own = self.own.rows, self.own.alive
        for first_id, (rows, alive) in collectives.ring(self.group, self.num_instances, *own):
            yield _Shard(first_id, rows, alive, self.own.block)

    def _mean(self) -> Float[Tensor, " dim"]:
        """Of the unit rows of all ranks."""
        total = torch.zeros(self.own.rows.shape[1], device=self.device)
        for start in self.own.starts():
            rows = self.own.rows[self.own.part(start)].float()
            total += (rows * inverse_norms(rows)).sum(dim=0)
        return collectives.all_reduce(self.group, total) / self.num_instances

    def _lifted(self, shard: _Shard, start: int) -> Tensor:
        return self.frame.lift(shard.rows[shard.part(start)])

    def _bound(self, best: _Best) -> None:
        """The bounds that the sample suggests.

        The n-th best of the sample is about the n N / sample-th of all, off by a factor of 1 / sqrt(n) or so. With n so
        that it is the 4 k-th, less than one row in a thousand has too few that reach it, and is searched alone.
        """
        best.lifted.copy_(self._lifted(self.own, best.start))
        n = max(12, -(-4 * self.k * len(self.sample) // self.num_instances))
        best.bound.fill_(-torch.inf)
        if n < len(self.sample) // 2:
            best.bound.copy_(self._best_of_sample(best.lifted, n)[:, -1])
        best.first_bound.copy_(best.bound)

    def _best_of_sample(self, lifted: Float[Tensor, "rows lifted"], n: int) -> Float[Tensor, "rows n"]:
        """Block by block, as the sample grows with the number of classes."""
        best = lifted.new_empty(len(lifted), 0)
        memory = lifted.new_empty(self.own.block**2)
        for keys in self.sample.split(self.own.block):
            found = product(lifted, keys, memory).topk(min(n, len(keys)), dim=1, sorted=False).values
            best = torch.cat([best, found], dim=1)
            best = best.topk(min(n, best.shape[1]), dim=1).values
        return best

    def _among_themselves(self, panel: dict[int, _Best]) -> None:
        """Blocks of the panel with each other, both ways at once."""
        starts = list(panel)

        def scan(pair: tuple[int, int]) -> None:
            n, at = pair
            here = panel[starts[n]]
            memory = here.lifted.new_empty(self.own.block**2)
            for start in starts[at : at + BLOCKS_AT_ONCE]:
                there = panel[start]
                scores = product(here.lifted, self.frame.keys(there.lifted), memory)
                if there is here:
                    scores.fill_diagonal_(-torch.inf)
                row, column, found = reaching(scores, here.bound)
                self._add(here, row, self.own, start + column, found)
                if there is not here:
                    row, column, found = reaching(scores, there.bound, by_column=True)
                    self._add(there, column, self.own, starts[n] + row, found)

        threads.on_each(scan, _pairs(len(starts)), self.device, self.scanned)

    def _with(self, shard: _Shard, panel: dict[int, _Best], starts: list[int]) -> None:
        """Blocks of the panel with others, one way."""

        def scan(here: _Best) -> None:
            memory = here.lifted.new_empty(self.own.block**2)
            for start in starts:
                scores = product(here.lifted, self.frame.keys(self._lifted(shard, start)), memory)
                row, column, found = reaching(scores, here.bound)
                self._add(here, row, shard, start + column, found)

        threads.on_each(scan, panel.values() if starts else [], self.device, self.scanned)

    def _add(self, best: _Best, row: Tensor, shard: _Shard, places: Tensor, scores: Tensor) -> None:
        """places: of the candidates among the shard's rows."""
        if not self.all_alive:
            lives = shard.alive[places].nonzero()[:, 0]
            row, places, scores = row[lives], places[lives], scores[lives]
        if len(row):
            best.add(row, (places + shard.first_id).to(torch.int32), scores)

    def one_by_one(self, places: Int[Tensor, " alone"], table: Tensor) -> None:
        """Search these rows again, with room for any number of near-ties."""
        batches = [_Alone(some, self.frame.lift(self.own.rows[some])) for some in places.split(ALONE_AT_ONCE)]
        for shard in self._ring():
            threads.on_each(functools.partial(self._search, shard), batches if len(places) else [], self.device)
        for batch in batches if len(places) else []:
            _, ids, _ = batch.first(self.k)
            table[batch.places] = ids.view(len(batch.places), self.k).to(table.device, torch.int32)

    def _search(self, shard: _Shard, batch: "_Alone") -> None:
        """First for the k-th best score by float32, then for all that are as near."""
        best = batch.lifted.new_full((len(batch.places), self.k), -torch.inf)
        for start in shard.starts():
            best = torch.cat([best, self._scores(batch, shard, start)], dim=1).topk(self.k, dim=1).values
        bound = best[:, -1] - rounding(batch.lifted[:, -1], best[:, -1])
        for start in shard.starts():
            scores = self._scores(batch, shard, start)
            row, column = ((scores >= bound[:, None]) & ~torch.isinf(scores)).nonzero(as_tuple=True)
            exact = exact_cosines(self.own.rows, batch.places[row], shard.rows, start + column)
            batch.add(row.to(exact.device), (shard.first_id + start + column).to(exact.device), exact, self.k)

    def _scores(self, batch: "_Alone", shard: _Shard, start: int) -> Tensor:
        scores = batch.lifted @ self.frame.keys(self._lifted(shard, start)).T
        scores.masked_fill_(~shard.alive[shard.part(start)], -torch.inf)
        here, own = shard.places(batch.places + self.own.first_id)[0] - start, shard.first_id == self.own.first_id
        is_self = (here >= 0) & (here < scores.shape[1]) & own
        scores[is_self, here[is_self]] = -torch.inf
        return scores


def _pairs(num_blocks: int) -> list[tuple[int, int]]:
    """(a block of the panel, the first of the blocks that it is compared with at once)."""
    return [(n, at) for n in range(num_blocks) for at in range(n, num_blocks, BLOCKS_AT_ONCE)]


class _Alone:
    """Some rows of a search without bounds, and their candidates in float64."""

    def __init__(self, places: Tensor, lifted: Tensor) -> None:
        self.places, self.lifted = places, lifted
        self.candidates: list[tuple[Tensor, Tensor, Tensor]] = []
        self.num = 0

    def add(self, row: Tensor, ids: Tensor, scores: Tensor, k: int) -> None:
        self.candidates.append((row, ids, scores))
        self.num += len(row)
        if self.num > MAX_ALONE_CANDIDATES:
            self.candidates = [self.first(k)]
            self.num = len(self.candidates[0][0])

    def first(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        row, ids, scores = (torch.cat(parts) for parts in zip(*self.candidates))
        return first_of_each(row, ids, scores, k)

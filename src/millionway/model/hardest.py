"""Exact top-K among rows, by cosine. Never [classes, classes] in memory.

A bound per row, known before the search, lets nearly all products pass by with one comparison:

1. A lower bound of each row's K-th best cosine. From an earlier table it is certain: its neighbors, scored again.
   Without one it is a guess from a sample of the rows, checked at the end.
2. All products, block by block. A block serves its rows and its columns, so half of them are enough. What reaches the
   bound is a candidate of its row. Rows are sorted by their bound, so that one number serves a whole block.
3. The K best candidates, ordered by (cosine, lower id). Where float32 cannot tell, in float64. A row with too few
   candidates (the guess was too high) or too many (many duplicates) is searched alone.

The rows of several ranks meet by traveling around the ring of ranks, once for step 2 and once for step 3. The result
does not depend on ranks, blocks, bounds or guesses.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from millionway.model import threads
from millionway.model.rows import TINY_NORM
from millionway.parallel import collectives
from millionway.parallel.group import Group
from millionway.parallel.layout import find_places, local_range

BLOCK_ROWS = {"cpu": 1024}  # 4 MiB of cosines for each core; a GPU wants larger products
BLOCK_ROWS_ELSEWHERE = 8192
BLOCKS_AT_ONCE = 32  # that a worker takes
ROUNDING = 2e-6  # two float32 cosines that differ by more are in the same order in float64
MARGIN = 1e-5  # what is nearer to the K-th than this is told apart in float64
MIN_SAMPLE_ROWS = 4096
MAX_CANDIDATE_BYTES = 1 << 31  # beyond it the rows are searched in several panels, and blocks between them twice
NO_BOUND = -2.0


@dataclass
class _Shard:
    """Some rank's rows while they are here."""

    first_id: int
    rows: Tensor
    alive: Tensor

    def unit(self) -> Tensor:
        return F.normalize(self.rows.float(), eps=TINY_NORM)

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return find_places(ids, self.first_id, self.first_id + len(self.rows))


def top_k(
    rows: Float[Tensor, "classes dim"],
    k: int,
    alive: Bool[Tensor, " classes"],
    earlier: Int[Tensor, "classes _"] | None = None,
    group: Group | None = None,
    num_instances: int | None = None,
) -> Int[Tensor, "classes k"]:
    """Ids of the k most similar other rows of all ranks, most similar first, ties by lower id; dead rows left out.

    earlier: a table of the same rows from before they moved; the result is the same, sooner.
    """
    num_instances = len(rows) if num_instances is None else num_instances
    travel = _Travel(rows, alive, group or Group(), num_instances)
    own = travel.own()
    unit = own.unit()
    sample = _Sample.take(unit, k, travel)
    bounds = unit.new_full((len(unit),), NO_BOUND)
    if earlier is not None and earlier.shape[1] >= k:
        bounds = _bounds_from_table(unit, earlier[:, :k], travel)
    bounds = sample.raise_low(unit, bounds)
    result, undecided, alone = _Search(own, unit, k, bounds - MARGIN).run(travel)
    _Decision(own, unit, k, undecided, alone).run(travel, result)
    return result


@dataclass
class _Travel:
    """The journeys of all ranks' rows."""

    rows: Tensor
    alive: Tensor
    group: Group
    num_instances: int

    def own(self) -> _Shard:
        return _Shard(local_range(self.num_instances, self.group.rank, self.group.size)[0], self.rows, self.alive)

    def ring(self) -> Iterator[_Shard]:
        """Everybody's rows, our own first."""
        for first_id, (rows, alive) in collectives.ring(self.group, self.num_instances, self.rows, self.alive):
            yield _Shard(first_id, rows, alive)


def _bounds_from_table(unit: Tensor, earlier: Tensor, travel: _Travel) -> Tensor:
    """The smallest cosine with the earlier neighbors: at least K rows are that near.

    A row that has lost a neighbor gets none, so many candidates, and is searched alone.
    """
    bounds = unit.new_full((len(unit),), 2.0)
    for shard in travel.ring():
        others = shard.unit()
        if len(others) == 0:
            continue
        smallest = functools.partial(_smallest_cosines, shard, others)
        parts = threads.on_each(smallest, zip(unit.split(64), earlier.split(64)), unit.device)
        bounds = torch.minimum(bounds, torch.cat([bounds[:0], *parts]))
    return bounds


def _smallest_cosines(shard: _Shard, others: Tensor, part: tuple[Tensor, Tensor]) -> Tensor:
    """Of each row with those of its neighbors that are in the shard."""
    unit, ids = part
    places, here = shard.places(ids)
    near = torch.index_select(others, 0, places.flatten()).view(*ids.shape, -1)
    cosines = torch.bmm(near, unit[:, :, None])[:, :, 0]
    cosines.masked_fill_(~shard.alive[places], NO_BOUND)
    return cosines.masked_fill_(~here, 2.0).amin(dim=1)


def _room(k: int) -> int:
    """Candidates a row may have: the K best, and what a cautious bound lets in besides. More: it is searched alone."""
    return 10 * k + 512


@dataclass
class _Sample:
    """Some rows of all ranks, from which it is estimated how many of all reach a bound."""

    columns: Tensor  # [dim, sample]
    place: int
    """the n-th best of the sample is about the n x N / sample-th of all: more than K, and well within the room"""
    few: int
    """a bound that this many of the first `checked` reach lets in too many"""
    checked: int

    @staticmethod
    def take(unit: Tensor, k: int, travel: _Travel) -> "_Sample":
        """Estimates from n rows of a sample are off by a factor of 1 / sqrt(n) or so; n is at least 12 here."""
        num, own, room = travel.num_instances, travel.own(), _room(k)
        every = max(1, num // max(MIN_SAMPLE_ROWS, -(-24 * num // room)))
        ids = torch.arange(0, num, every, device=unit.device)
        places, here = own.places(ids)
        places = places[here]
        sample = collectives.all_gather_uneven(travel.group, unit[places[own.alive[places]]])
        if num <= 8 * k or len(sample) == 0:
            return _Sample(unit.new_empty(unit.shape[1], 0), 0, 1, 0)  # everything is a candidate
        place = min(len(sample), max(12, -(-4 * k * len(sample) // num)))
        checked = min(len(sample), -(-12 * num // room))
        order = torch.randperm(len(sample), generator=torch.Generator().manual_seed(0)).to(unit.device)
        return _Sample(sample[order].T.contiguous(), place, max(1, checked * room // (2 * num)), checked)

    def raise_low(self, unit: Tensor, bounds: Tensor) -> Tensor:
        """Bounds that would let in too many become guesses, checked at the end. They may be too high for a few rows."""
        if self.checked == 0:
            return bounds
        parts = zip(unit.split(1024), bounds.split(1024))
        return torch.cat([bounds[:0], *threads.on_each(self._raise, parts, unit.device)])

    def _raise(self, part: tuple[Tensor, Tensor]) -> Tensor:
        unit, bounds = part
        known = bounds > NO_BOUND
        low = ~known
        if bool(known.any()):
            low |= ((unit @ self.columns[:, : self.checked]) >= bounds[:, None]).sum(dim=1) > self.few
        if bool(low.any()):
            guesses = (unit[low] @ self.columns).topk(self.place, dim=1).values[:, -1]
            bounds[low] = torch.maximum(bounds[low], guesses)
        return bounds


class _Search:
    """This rank's rows, in the order of their bounds, and their candidates."""

    def __init__(self, own: _Shard, unit: Tensor, k: int, bounds: Tensor) -> None:
        self.k, self.device = k, unit.device
        self.block = BLOCK_ROWS.get(unit.device.type, BLOCK_ROWS_ELSEWHERE)
        bounds, self.order = bounds.sort(stable=True)
        self.bounds = list(bounds.split(self.block)) if len(unit) else []
        self.lowest = [float(block[0]) for block in self.bounds]
        self.unit = unit[self.order].split(self.block)
        self.ids = (self.order + own.first_id).to(torch.int32).split(self.block)
        self.alive = None if bool(own.alive.all()) else own.alive[self.order].split(self.block)
        self.room = _room(k)
        self.counts = [torch.zeros_like(block, dtype=torch.int64) for block in self.bounds]
        self.candidates: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in self.bounds]

    def run(self, travel: _Travel) -> tuple[Tensor, list["_Undecided"], list[int]]:
        """(table, what is to be told apart, places of rows to be searched alone)"""
        table = torch.empty(len(self.order), self.k, dtype=torch.int32, device=self.device)
        undecided, alone = [], []
        blocks = range(len(self.bounds))
        panel = max(1, MAX_CANDIDATE_BYTES // (8 * self.room * self.block))
        if travel.group.size > 1:
            panel = max(1, len(blocks))  # one journey for all
        for start in range(0, max(1, len(blocks)), panel):
            here = blocks[start : start + panel]
            for shard in travel.ring():
                if shard.rows is travel.rows:
                    self._among_themselves(here)
                else:
                    self._with(shard)
            for block, (best, some, to_search) in zip(here, threads.on_each(self._choose, here, self.device)):
                places = self.order[block * self.block :][: len(best)]
                table[places] = best
                some.rows = places[some.rows]
                undecided.append(some)
                alone += places[to_search].tolist()
        return table, undecided, alone

    def _among_themselves(self, panel: range) -> None:
        """Blocks of the panel with each other, both ways at once; and with the blocks outside, one way."""
        items = []
        for i in panel:
            others = [j for j in range(len(self.bounds)) if j >= i or j not in panel]
            items += [(i, others[n : n + BLOCKS_AT_ONCE]) for n in range(0, len(others), BLOCKS_AT_ONCE)]

        def scan(item: tuple[int, list[int]]) -> None:
            i, others = item
            memory = self.unit[0].new_empty(self.block**2)
            for j in others:
                both_ways = i != j and j in panel
                lowest = min(self.lowest[i], self.lowest[j]) if both_ways else self.lowest[i]
                row, column, scores = _reaching(self.unit[i], self.unit[j], lowest, memory)
                if i == j:
                    row, column, scores = (part[row != column] for part in (row, column, scores))
                self._add(i, row, scores, self.ids[j], column, None if self.alive is None else self.alive[j])
                if both_ways:
                    self._add(j, column, scores, self.ids[i], row, None if self.alive is None else self.alive[i])

        threads.on_each(scan, items, self.device)

    def _with(self, shard: _Shard) -> None:
        """All rows with those of another rank."""
        unit = shard.unit().split(self.block)
        ids = torch.arange(shard.first_id, shard.first_id + len(shard.rows), dtype=torch.int32, device=self.device)
        alive = shard.alive.split(self.block)
        if len(shard.rows) == 0:
            return

        def scan(i: int) -> None:
            memory = unit[0].new_empty(self.block**2)
            for others, other_ids, others_alive in zip(unit, ids.split(self.block), alive):
                row, column, scores = _reaching(self.unit[i], others, self.lowest[i], memory)
                self._add(i, row, scores, other_ids, column, others_alive)

        threads.on_each(scan, range(len(self.bounds)), self.device)

    def _add(
        self, block: int, row: Tensor, scores: Tensor, ids: Tensor, column: Tensor, others_alive: Tensor | None
    ) -> None:
        """Keep what reaches the bound of its own row. Several workers may do so for one block at a time."""
        good = scores >= torch.index_select(self.bounds[block], 0, row)
        if others_alive is not None:
            good &= torch.index_select(others_alive, 0, column)
        good = _places(good)
        if len(good) == 0:
            return
        row = row[good]
        self.candidates[block].append((row.to(torch.int16), ids[column[good]], scores[good]))
        counts = self.counts[block].add_(torch.bincount(row, minlength=len(self.counts[block])))
        # No candidate reaches this; a count that two workers add to at once may be too low, and only takes memory.
        self.bounds[block].masked_fill_(counts > self.room, torch.inf)

    def _choose(self, block: int) -> tuple[Tensor, "_Undecided", Tensor]:
        """(table, what float32 leaves open, rows to be searched alone)"""
        rows = [torch.empty(0, dtype=torch.int16, device=self.device), *(c[0] for c in self.candidates[block])]
        some_ids = [torch.empty(0, dtype=torch.int32, device=self.device), *(c[1] for c in self.candidates[block])]
        some_scores = [self.bounds[block][:0], *(c[2] for c in self.candidates[block])]
        self.candidates[block] = []
        row, ids, scores = torch.cat(rows), torch.cat(some_ids), torch.cat(some_scores)
        order = _stable_order(row)
        row = row[order].long()
        num = torch.bincount(row, minlength=len(self.bounds[block]))
        slot = torch.arange(len(row), device=self.device) - torch.index_select(num.cumsum(0) - num, 0, row)
        width = max(self.k + 1, int(num.amax()))
        flat = row * width + slot
        table = scores.new_full((len(num), width), -torch.inf)
        table.view(-1)[flat] = scores[order]
        table_ids = ids.new_zeros(len(num), width)
        table_ids.view(-1)[flat] = ids[order]
        return self._best(block, table_ids, table)

    def _best(self, block: int, ids: Tensor, scores: Tensor) -> tuple[Tensor, "_Undecided", Tensor]:
        """The first K of the candidates by float32, of a few more than K."""
        k, width = self.k, scores.shape[1]
        scores, places = scores.topk(min(k + 8, width), dim=1)
        ids = ids.gather(1, places)
        gaps = scores[:, :-1] - scores[:, 1:]
        close = F.pad(gaps < ROUNDING, (1, 1))  # with the one before, with the one after
        close = (close[:, :-1] | close[:, 1:]) | ((scores - scores[:, k - 1 : k]).abs() < MARGIN)
        close[:, k - 1] &= close.sum(dim=1) > 1
        # Searched alone: where the K-th does not clear the bound, so that one outside might be nearer by rounding; and
        # where more than the few are as near as the K-th, as among duplicates.
        kth, last = scores[:, k - 1], scores[:, -1]
        alone = kth < self.bounds[block] + MARGIN / 2
        if scores.shape[1] < width:
            alone |= (last >= kth - MARGIN) & ~torch.isinf(last)
        unsure = (close.any(dim=1) & ~alone).nonzero()[:, 0]
        return ids[:, :k], _Undecided(unsure, ids[unsure], scores[unsure], close[unsure]), alone.nonzero()[:, 0]


@dataclass
class _Undecided:
    """Rows some of whose candidates are too close for float32."""

    rows: Tensor  # [undecided]
    ids: Tensor  # [undecided, candidates]
    scores: Tensor
    close: Tensor
    """the candidates to be told apart; float32 has the others in their order, also with respect to these"""

    def split(self, size: int) -> Iterator["_Undecided"]:
        parts = zip(*(each.split(size) for each in (self.rows, self.ids, self.scores, self.close)))
        return (_Undecided(*part) for part in parts)


class _Decision:
    """What float32 left open, in float64; and the rows to be searched alone."""

    def __init__(self, own: _Shard, unit: Tensor, k: int, undecided: list[_Undecided], alone: list[int]) -> None:
        self.own, self.unit, self.k, self.alone = own, unit, k, alone
        self.undecided = [part for some in undecided for part in some.split(256)]
        self.exact = [_float64(part.scores).copy_(part.scores) for part in self.undecided]
        self.found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in alone]

    def run(self, travel: _Travel, result: Tensor) -> None:
        for shard in travel.ring():
            if len(shard.rows):
                threads.on_each(functools.partial(self._score, shard), range(len(self.undecided)), self.unit.device)
                search = functools.partial(self._search, shard, shard.unit() if self.alone else self.unit)
                threads.on_each(search, range(len(self.alone)), self.unit.device)
        for part, exact in zip(self.undecided, self.exact):
            result[part.rows] = _ordered(part.ids.to(exact.device), exact, self.k).to(result.device)
        for place, parts in zip(self.alone, self.found):
            ids, exact = (torch.cat(each)[None] for each in zip(*parts))
            result[place] = _ordered(ids.to(torch.int32), exact, self.k)[0].to(result.device)

    def _score(self, shard: _Shard, number: int) -> None:
        part = self.undecided[number]
        row, column = part.close.nonzero(as_tuple=True)
        places, here = shard.places(part.ids[row, column])
        row, column, places = row[here], column[here], places[here]
        cosines = _exact(self.own.rows[part.rows[row]], shard.rows[places][:, None])[:, 0]
        self.exact[number].index_put_((row.to(cosines.device), column.to(cosines.device)), cosines)

    def _search(self, shard: _Shard, others: Tensor, number: int) -> None:
        """One row against a whole shard, without a bound."""
        row = self.alone[number]
        cosines = others @ self.unit[row]
        cosines.masked_fill_(~shard.alive, -torch.inf)
        if shard.first_id == self.own.first_id:
            cosines[row] = -torch.inf
        kth = cosines.topk(min(self.k, len(cosines))).values[-1]
        near = ((cosines >= kth - MARGIN) & ~torch.isinf(cosines)).nonzero()[:, 0]
        exact = _exact(self.own.rows[row][None], shard.rows[near][None])[0]
        self.found[number].append((near.to(exact.device) + shard.first_id, exact))


def _reaching(a: Tensor, b: Tensor, lowest: float, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(row, column, cosine) of the pairs whose cosine reaches `lowest`."""
    cosines = memory[: len(a) * len(b)]
    torch.mm(a, b.T, out=cosines.view(len(a), len(b)))
    found = _places(cosines, lowest)
    row = found // len(b)
    return row, found - row * len(b), torch.index_select(cosines, 0, found)


def _places(values: Tensor, lowest: float | None = None) -> Int[Tensor, " found"]:
    """Ascending places of True, or of numbers >= lowest. On a CPU numpy is six times as fast."""
    if values.device.type != "cpu":
        return (values if lowest is None else values >= lowest).nonzero()[:, 0]
    array = values.numpy()
    return torch.from_numpy(np.flatnonzero(array if lowest is None else array >= np.float32(lowest)))


def _stable_order(keys: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """On a CPU numpy sorts 16-bit numbers by their digits."""
    if keys.device.type != "cpu":
        return keys.argsort(stable=True)
    return torch.from_numpy(np.argsort(keys.numpy(), kind="stable"))


def _float64(like: Tensor) -> Tensor:
    """MPS has no float64: such work is done on the CPU."""
    return torch.empty(like.shape, dtype=torch.float64, device="cpu" if like.device.type == "mps" else like.device)


def _exact(queries: Float[Tensor, "q dim"], others: Float[Tensor, "q n dim"]) -> Float[Tensor, "q n"]:
    """Cosines in float64, each by the same operations, so that equal rows get equal ones."""
    device = _float64(queries).device
    a, b = queries.to(device, torch.float64)[:, None, :], others.to(device, torch.float64)
    lengths = [torch.linalg.vector_norm(each, dim=2) for each in (a, b)]
    product = lengths[0] * lengths[1]
    zero = (lengths[0] < TINY_NORM) | (lengths[1] < TINY_NORM)
    return ((a * b).sum(dim=2) / product).masked_fill_(zero, 0)


def _ordered(ids: Tensor, scores: Tensor, k: int) -> Int[Tensor, "q k"]:
    """The first k of the ids by (cosine, lower id)."""
    ids, order = ids.sort(dim=1)
    best = scores.gather(1, order).argsort(dim=1, descending=True, stable=True)[:, :k]
    return ids.gather(1, best)

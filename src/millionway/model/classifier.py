"""The million-way classifier: one row per image, a cosine softmax over all of them.

    cos_ij = <w_j, x_i> / (|w_j| |x_i|)        e_ij = exp(cos_ij / tau)        Z_i = sum over all j of e_ij
    J = -(1/B) sum_i log( sum_j y_ij e_ij / Z_i )
    y_ii = 1 - alpha,  y_ij = alpha / K for the K hardest classes j of i,  else 0

The logarithm is outside the sum. The gradient with respect to cos_ij / tau is (p_ij - q_ij) / B with p = e / Z and
q_ij = y_ij e_ij / sum_k y_ik e_ik. A vector shorter than 1e-12 counts as zero: cosine 0, gradient 0.

The passes over the rows are in softmax.py. After the first one the embedding gradient is known, so the encoder's
backward and the second pass (`update`) do not wait for each other.
"""

import logging
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from millionway import randomness
from millionway.model import hardest as hardest_search
from millionway.model import softmax, threads
from millionway.model.softmax import unit
from millionway.parallel import collectives
from millionway.parallel.group import Group
from millionway.parallel.launcher import local_size
from millionway.parallel.layout import find_places, local_range

log = logging.getLogger("millionway")

STORAGE = (torch.float32, torch.float64, torch.bfloat16)
ROWS_DRAWN_AT_ONCE = 1 << 11
TARGET_ROWS_AT_ONCE = 1 << 14  # rows gathered at a time for the sparse part of the embedding gradient


class NotFiniteError(ValueError):
    """Embeddings or rows with NaN or infinity."""


@dataclass
class _Pass:
    """What the update needs from the forward pass."""

    classes: Int[Tensor, " chosen"] | None  # None is all of them
    rows: softmax.Rows
    unit_x: Float[Tensor, "batch dim"]
    pairs: softmax.Pairs
    pair_shares: Float[Tensor, " pairs"]
    first: softmax.FirstPass
    z: Float[Tensor, " batch"]


@dataclass
class Comparison:
    """Of embeddings with all rows."""

    ranks: Int[Tensor, " batch"]
    """how many other classes score as high as the own one"""
    own: Float[Tensor, " batch"]
    """cosine with the own row"""
    nearest_other: Float[Tensor, " batch"]
    """the largest cosine with another row"""


class _KnownGradient(torch.autograd.Function):
    """A scalar whose gradient with respect to the embeddings is already there."""

    @staticmethod
    def forward(ctx, embeddings: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx, *upstream: Tensor):
        (gradient,) = ctx.saved_tensors
        return upstream[0] * gradient, None, None


class InstanceClassifier(nn.Module):
    """This rank's rows. Rows and momentum are buffers, outside any optimizer: `update` moves them."""

    weight: Tensor
    momentum: Tensor
    alive: Tensor

    def __init__(
        self,
        num_instances: int,
        dim: int,
        temperature: float = 0.15,
        group: Group | None = None,
        storage: torch.dtype = torch.float32,
        keep_bytes: int | None = None,
        device: torch.device | str | None = None,
        *,
        seed: int = 0,
        classes_per_step: int | None = None,
    ) -> None:
        """storage: dtype of rows and momentum; bfloat16 is rounded at random, and computed in float32.

        keep_bytes: budget for exponentials kept from the first pass to the second (0: always computed again). By
        default a quarter of the free memory on a CPU; on a GPU computing them again is faster.
        classes_per_step: compare with that many sampled classes outside the batch (and the batch's own) instead of all.
        """
        super().__init__()
        if num_instances < 1 or dim < 1:
            raise ValueError(f"a classifier needs at least one instance and one dimension, not {num_instances} x {dim}")
        if not 0 < temperature < float("inf"):
            raise ValueError(f"temperature must be positive and finite, not {temperature}")
        if storage not in STORAGE:
            raise ValueError(f"storage must be one of {', '.join(map(str, STORAGE))}, not {storage}")
        if classes_per_step is not None and classes_per_step < 1:
            raise ValueError(f"classes_per_step must be positive, not {classes_per_step}")
        if keep_bytes is not None and keep_bytes < 0:
            raise ValueError(f"keep_bytes must not be negative, not {keep_bytes}")
        self.num_instances = num_instances
        self.dim = dim
        self.temperature = temperature
        self.group = group or Group()
        self.keep_bytes = keep_bytes
        self.seed = seed
        self.classes_per_step = classes_per_step
        self.step = 0  # counts updates; sampled classes and rounding are functions of (seed, step)
        self.local_range = local_range(num_instances, self.group.rank, self.group.size)
        start, stop = self.local_range
        self.register_buffer("weight", torch.empty(stop - start, dim, dtype=storage, device=device))
        self.register_buffer("momentum", torch.zeros_like(self.weight))
        self.register_buffer("alive", torch.ones(stop - start, dtype=torch.bool, device=device))
        key = randomness.key_of(seed, "rows")

        def draw(first: int) -> None:
            last = min(first + ROWS_DRAWN_AT_ONCE, stop)
            self.weight[first - start : last - start] = randomness.normal(key, torch.arange(first, last), dim)

        threads.on_each(draw, range(start, stop, ROWS_DRAWN_AT_ONCE), torch.device("cpu"))
        self._pass: _Pass | None = None
        self._kept: list[Tensor] = []
        self._inverse_norm: Tensor | None = None
        self._weight_version = -1
        self._half_written = False

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float32 if self.weight.dtype == torch.bfloat16 else self.weight.dtype

    def forward(
        self,
        embeddings: Float[Tensor, "batch dim"],
        instance_ids: Int[Tensor, " batch"],
        hardest: Int[Tensor, "classes k"] | None = None,
        alpha: float = 0.0,
    ) -> Float[Tensor, ""]:
        """The mean loss over the batch. In grad mode it also stores what `update` needs."""
        storing = torch.is_grad_enabled()
        if storing and self._pass is not None:
            raise RuntimeError("the last forward pass has not been used: call update() before the next one")
        group, tau = self.group, self.temperature
        x, ids = self._gathered(embeddings, instance_ids)
        targets, shares = self._targets(ids, hardest, alpha)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            unit_x, inverse_norm_x = unit(x)
            rows, classes, places = self._rows(ids, targets, len(x))
            pairs = softmax.Pairs.build(places, len(rows), rows.block)
            shift = target_shift = None
            if tau < softmax.NO_SHIFT_ABOVE:
                shift, target_shift = collectives.all_reduce_max(
                    group, softmax.largest_logits(unit_x, rows, pairs, tau)
                )
            kept = self._room_to_keep(len(x), rows) if storing else []
            first = softmax.first_pass(unit_x, rows, pairs, tau, shift, kept)
            # What a target adds to the numerator: y e. Zero for targets whose rows are elsewhere.
            logits = first.pair_logits if target_shift is None else first.pair_logits - target_shift[pairs.samples]
            added = logits.new_zeros(targets.shape)  # [batch, targets]
            added.view(-1)[pairs.places] = logits.exp2()
            added *= shares
            added[self._dead_here(ids), 0] = torch.nan
            z, numerator = collectives.all_reduce(group, torch.stack([first.z, added.sum(dim=1)]))
            self._check_alive(ids, numerator)
            loss = z.log() - numerator.log()
            if shift is not None and target_shift is not None:
                loss += (shift - target_shift) / softmax.LOG2_E
            loss = loss.mean()
            if not storing:
                return loss
            q = added / numerator[:, None]
            gradient = first.o / z[:, None] - self._weighted_rows(rows, places, q)
            gradient /= tau * len(x)  # with respect to the unit embeddings, by the rows that are here
            gradient = collectives.reduce_scatter(group, gradient)
            own = slice(group.rank * len(gradient), (group.rank + 1) * len(gradient))
            along = (unit_x[own] * gradient).sum(dim=1, keepdim=True)
            gradient = (gradient - unit_x[own] * along) * inverse_norm_x[own]
        self._pass = _Pass(classes, rows, unit_x, pairs, q.view(-1)[pairs.places], first, z)
        return _KnownGradient.apply(embeddings, loss, gradient.to(embeddings.dtype))

    @torch.no_grad()
    def update(self, lr: float, momentum: float = 0.9, weight_decay: float = 1e-4) -> None:
        """One step of SGD on the rows, from the stored forward pass. Rows dead or not sampled stay as they are."""
        if self._pass is None:
            raise RuntimeError("update() needs a forward pass in grad mode before it")
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be at least 0 and finite, not {value}")
        stored, self._pass = self._pass, None
        key = randomness.key_of(self.seed, "rounding", self.step)
        move = softmax.Move(lr, momentum, weight_decay, key)
        velocity = self.momentum if stored.classes is None else self.momentum[stored.classes]
        self._half_written = True
        with torch.autocast(self.weight.device.type, enabled=False):
            softmax.second_pass(
                stored.unit_x,
                stored.rows,
                velocity,
                stored.pairs,
                stored.pair_shares,
                stored.first,
                stored.z,
                self.temperature,
                move,
            )
        if stored.classes is not None:
            assert self._inverse_norm is not None
            self.weight[stored.classes] = stored.rows.weight
            self.momentum[stored.classes] = velocity
            self._inverse_norm[stored.classes] = stored.rows.inverse_norm
        self._half_written = False
        self._weight_version = self.weight._version
        self.step += 1

    @torch.no_grad()
    def hardest(self, k: int, earlier: Int[Tensor, "classes _"] | None = None) -> Int[Tensor, "classes k"]:
        """The k classes whose rows are most similar to each row, itself excluded: int32 ids, most similar first.

        earlier: the table of an epoch ago; with it the same result comes sooner.
        """
        num_others = int(collectives.all_reduce(self.group, self.alive.sum())) - 1
        if not 0 < k <= num_others:
            raise ValueError(f"k must be from 1 to {num_others}, the number of other classes, not {k}")
        with torch.autocast(self.weight.device.type, enabled=False):
            return hardest_search.top_k(self.weight, k, self.alive, earlier, self.group, self.num_instances)

    @torch.no_grad()
    def ranks(
        self, embeddings: Float[Tensor, "batch dim"], instance_ids: Int[Tensor, " batch"]
    ) -> Int[Tensor, " batch"]:
        """How many other classes score as high as its own, per embedding; 0 is a top-1 hit, below 5 a top-5 hit.

        As high up to the rounding of a cosine: 1e-6, or 1e-12 in float64.
        """
        return self.compare(embeddings, instance_ids).ranks

    @torch.no_grad()
    def compare(self, embeddings: Float[Tensor, "batch dim"], instance_ids: Int[Tensor, " batch"]) -> "Comparison":
        """Each embedding with all rows."""
        x, ids = self._gathered(embeddings, instance_ids)
        with torch.autocast(x.device.type, enabled=False):
            unit_x, _ = unit(x)
            rows = self._all_rows(len(x))
            own = self._own_cosines(unit_x, ids, rows)
            high = (own - (1e-12 if x.dtype == torch.float64 else 1e-6))[:, None]
            as_high, nearest = torch.zeros_like(ids), x.new_full((len(x),), -torch.inf)
            unit_rows = rows.room(x.dtype)
            for block in rows.blocks():
                cosines = unit_x @ block.unit(out=unit_rows).T
                if block.dead is not None:
                    cosines.masked_fill_(block.dead, -torch.inf)
                place = ids - block.first_id
                here = ((place >= 0) & (place < len(block))).nonzero()[:, 0]
                cosines[here, place[here]] = -torch.inf  # itself does not count
                as_high += (cosines > high).sum(dim=1)
                torch.maximum(nearest, cosines.amax(dim=1), out=nearest)
        collectives.all_reduce(self.group, as_high)
        collectives.all_reduce_max(self.group, nearest)
        ours = [self.group.own_part(whole) for whole in (as_high, own, nearest)]
        return Comparison(*ours)

    @torch.no_grad()
    def take_rows(self, other: "InstanceClassifier") -> None:
        """Rows and momentum of another classifier under the same numbers; it may have another number of classes."""
        start, stop = self.local_range
        state = (other.weight, other.momentum)
        for first, (rows, momentum) in collectives.ring(other.group, other.num_instances, *state):
            ids = torch.arange(first, first + len(rows), device=rows.device)
            places, here = find_places(ids, start, stop)
            self.weight[places[here]] = rows[here]
            self.momentum[places[here]] = momentum[here]
        self.step = other.step

    @torch.no_grad()
    def set_rows(self, instance_ids: Int[Tensor, " n"], rows: Float[Tensor, "n dim"]) -> None:
        """Write rows as they are: those of the given classes that live here. No other rank is needed for it."""
        self._check_form(rows, instance_ids)
        vectors = self._checked(rows, instance_ids)
        places, here = find_places(instance_ids, *self.local_range)
        self.weight[places[here]] = vectors[here].to(self.weight.dtype)

    def _gathered(self, embeddings: Tensor, instance_ids: Tensor) -> tuple[Tensor, Tensor]:
        """All ranks' embeddings, in the dtype of the arithmetic, and their ids; checked, so that all ranks complain."""
        self._check_form(embeddings, instance_ids)
        parts = collectives.all_gather_together(
            self.group, embeddings.detach().to(self.compute_dtype), instance_ids.to(self.weight.device)
        )
        return self._checked(*parts), parts[1]

    def _dead_here(self, ids: Tensor) -> Int[Tensor, " dead"]:
        """Which of these classes have a dead row here."""
        places, here = find_places(ids, *self.local_range)
        if len(self.alive) == 0:
            return ids[:0]
        return (here & ~self.alive[places]).nonzero()[:, 0]

    def _check_alive(self, ids: Tensor, numbers: Tensor) -> None:
        """A dead class of any rank has left a NaN here, as a row that is not finite does; so all ranks complain."""
        wrong = torch.isnan(numbers)
        if not bool(wrong.any()):
            return
        is_dead = torch.zeros(len(ids), dtype=torch.int32, device=ids.device)
        is_dead[self._dead_here(ids)] = 1
        dead = ids[collectives.all_reduce(self.group, is_dead) > 0]
        if len(dead):
            raise ValueError(f"instance {int(dead[0])} of the batch is not alive")
        raise NotFiniteError(f"the row of instance {int(ids[wrong][0])} is not finite (NaN or infinity)")

    def _own_cosines(self, unit_x: Tensor, ids: Tensor, rows: softmax.Rows) -> Float[Tensor, " batch"]:
        places, here = find_places(ids, *self.local_range)
        cosines = unit_x.new_zeros(len(ids))
        mine = here.nonzero()[:, 0]
        own_rows = rows.weight[places[mine]].to(unit_x.dtype) * rows.inverse_norm[places[mine]]
        cosines[mine] = (unit_x[mine] * own_rows).sum(dim=1)
        cosines[self._dead_here(ids)] = torch.nan
        collectives.all_reduce(self.group, cosines)
        self._check_alive(ids, cosines)
        return cosines

    def _check_form(self, vectors: Tensor, instance_ids: Tensor) -> None:
        if not vectors.is_floating_point():
            raise ValueError(f"expected vectors of floating point numbers, not {vectors.dtype}")
        if vectors.ndim != 2 or vectors.shape[1] != self.dim or len(vectors) == 0:
            raise ValueError(f"expected vectors of shape [batch, {self.dim}], not {list(vectors.shape)}")
        if instance_ids.dtype != torch.int64 or instance_ids.shape != vectors.shape[:1]:
            raise ValueError(
                f"expected {len(vectors)} int64 instance ids, not {instance_ids.dtype} {list(instance_ids.shape)}"
            )

    def _checked(self, vectors: Tensor, instance_ids: Tensor) -> Tensor:
        """The vectors, detached, in the dtype of the arithmetic; a ValueError names a value that is wrong."""
        self._check_ids(instance_ids, "instance ids")
        finite = torch.isfinite(vectors).all(dim=1)
        if not bool(finite.all()):
            first = int((~finite).nonzero()[0, 0])
            raise NotFiniteError(
                f"{int((~finite).sum())} of {len(finite)} vectors are not finite (NaN or infinity);"
                f" the first belongs to instance {int(instance_ids[first])}"
            )
        return vectors.detach().to(self.compute_dtype)

    def _check_ids(self, ids: Tensor, name: str) -> None:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.num_instances:
            raise ValueError(f"{name} run from {low} to {high}, but there are {self.num_instances} instances")

    def _targets(
        self, instance_ids: Tensor, hardest: Tensor | None, alpha: float
    ) -> tuple[Int[Tensor, "batch targets"], Float[Tensor, " targets"]]:
        """Classes with a share of the label, and the shares: the instance itself and, smoothed, its hardest classes."""
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha must be at least 0 and below 1, not {alpha}")
        own = instance_ids[:, None]
        if hardest is None or alpha == 0:
            return own, torch.ones(1, dtype=self.compute_dtype, device=self.weight.device)
        if self.classes_per_step is not None:
            raise ValueError("smoothing needs all classes; classes_per_step leaves most of them out")
        if hardest.ndim != 2 or len(hardest) != len(self.weight) or hardest.shape[1] == 0:
            raise ValueError(
                f"expected a table of hardest classes of shape [{len(self.weight)}, k], not {list(hardest.shape)}"
            )
        if hardest.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"expected a table of int32 ids of hardest classes, not {hardest.dtype}")
        k = hardest.shape[1]
        shares = torch.full((k + 1,), alpha / k, dtype=self.compute_dtype, device=self.weight.device)
        shares[0] = 1 - alpha
        places, here = find_places(instance_ids, *self.local_range)
        others = torch.zeros(len(own), k, dtype=torch.int32, device=own.device)
        others[here] = hardest[places[here]].to(torch.int32)
        others = collectives.all_reduce(self.group, others).to(torch.int64)  # each row comes from the rank that owns it
        self._check_ids(others, "the batch's hardest classes")
        return torch.cat([own, others], dim=1), shares

    def _sampled_classes(self, instance_ids: Tensor) -> Int[Tensor, " chosen"]:
        """Ascending ids of the batch's own classes and `classes_per_step` others, drawn without replacement."""
        assert self.classes_per_step is not None
        alive = collectives.all_gather_uneven(self.group, self.alive.to(torch.uint8)).bool()
        everyone = torch.arange(self.num_instances, device=self.weight.device)
        lottery = randomness.uniform(randomness.key_of(self.seed, "classes", self.step), everyone, 1)[:, 0]
        lottery[~alive] = 2.0
        lottery[instance_ids] = -1.0  # always in
        num_own = int((lottery < 0).sum())
        chosen = torch.argsort(lottery, stable=True)[: min(num_own + self.classes_per_step, int(alive.sum()))]
        return chosen.sort().values

    def _all_rows(self, batch: int) -> softmax.Rows:
        """The rows as a pass needs them."""
        if self._half_written:
            raise RuntimeError("an update failed half-way, so some rows have moved and others not: load a checkpoint")
        changed = self._weight_version != self.weight._version
        if self._inverse_norm is None or changed or self._inverse_norm.device != self.weight.device:
            parts = [softmax.inverse_norms(part.to(self.compute_dtype)) for part in self.weight.split(1 << 16)]
            self._inverse_norm = torch.cat(parts)
            self._weight_version = self.weight._version
        block = softmax.rows_per_block(batch, self.weight.device)
        dead = None if bool(self.alive.all()) else ~self.alive
        return softmax.Rows(self.weight, self._inverse_norm, block, dead, self.local_range[0])

    def _rows(
        self, instance_ids: Tensor, targets: Tensor, batch: int
    ) -> tuple[softmax.Rows, Int[Tensor, " chosen"] | None, Int[Tensor, "batch targets"]]:
        """(the rows this pass runs over, which of ours they are if not all, the targets as places among them).

        A place below 0 or beyond the last row is on another rank.
        """
        start, stop = self.local_range
        rows = self._all_rows(batch)
        if self.classes_per_step is None:
            return rows, None, targets - start
        chosen = self._sampled_classes(instance_ids)
        first, last = torch.searchsorted(chosen, torch.tensor([start, stop], device=chosen.device)).tolist()
        here = chosen[first:last] - start
        some = softmax.Rows(rows.weight[here], rows.inverse_norm[here], rows.block)
        return some, here, torch.searchsorted(chosen, targets) - first

    def _room_to_keep(self, batch: int, rows: softmax.Rows) -> list[Tensor]:
        """Memory for the exponentials of as many blocks as the budget allows, the same from step to step."""
        entries = batch * max(1, min(rows.block, len(rows)))  # a rank may own no rows
        block_bytes = entries * torch.finfo(self.compute_dtype).bits // 8
        num_blocks = -(-len(rows) // rows.block)
        if self.keep_bytes is None:
            self.keep_bytes = default_keep_bytes(self.weight.device, self.dim)
            kept = min(num_blocks, self.keep_bytes // block_bytes)
            log.info(
                "classifier: %d of %d blocks keep their exponentials, %d MB", kept, num_blocks, kept * block_bytes >> 20
            )
        num_kept = min(num_blocks, self.keep_bytes // block_bytes)
        if len(self._kept) != num_kept or any(room.numel() != entries for room in self._kept[:1]):
            self._kept = []  # let go of the old ones first
            self._kept = [
                torch.empty(entries, dtype=self.compute_dtype, device=self.weight.device) for _ in range(num_kept)
            ]
        return self._kept

    def _weighted_rows(self, rows: softmax.Rows, targets: Tensor, q: Tensor) -> Float[Tensor, "batch dim"]:
        """sum over the targets of q times the unit row. q is 0 for targets on other ranks."""
        if len(rows) == 0:
            return q.new_zeros(len(q), self.dim)
        targets = targets.clamp(0, len(rows) - 1)
        shares = q * rows.inverse_norm[:, 0][targets]
        if rows.weight.dtype == q.dtype:
            return F.embedding_bag(targets, rows.weight, mode="sum", per_sample_weights=shares)
        parts = []  # a few samples at a time, in the dtype of the arithmetic
        for some, weights in zip(
            *(t.split(max(1, TARGET_ROWS_AT_ONCE // targets.shape[1])) for t in (targets, shares))
        ):
            parts.append(torch.bmm(weights[:, None, :], rows.weight[some].to(q.dtype))[:, 0])
        return torch.cat(parts)


def default_keep_bytes(device: torch.device, dim: int) -> int:
    """A quarter of the free memory on a CPU. On a GPU computing again is faster up to about 280 dimensions."""
    if device.type == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (4 * local_size())
    if device.type == "cuda" and dim > 280:
        return torch.cuda.mem_get_info(device)[0] // 4
    return 0

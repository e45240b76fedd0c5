"""The million-way classifier: one row per image, a cosine softmax over all of them.

    cos_ij = <w_j, x_i> / (|w_j| |x_i|)        e_ij = exp(cos_ij / tau)        Z_i = sum over all j of e_ij
    J = -(1/B) sum_i log( sum_j y_ij e_ij / Z_i )
    y_ii = 1 - alpha,  y_ij = alpha / K for the K hardest classes j of i,  else 0

The logarithm is outside the sum. The gradient with respect to cos_ij / tau is (p_ij - q_ij) / B with p = e / Z and
q_ij = y_ij e_ij / sum_k y_ik e_ik. A vector shorter than 1e-12 counts as zero: cosine 0, gradient 0.

The passes over the rows are in softmax.py. After the first one the embedding gradient is known, so the encoder's
backward and the second pass (`update`) do not wait for each other.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from millionway import randomness
from millionway.model import compare, inputs, sampled, softmax, threads
from millionway.model import hardest as hardest_search
from millionway.model import passes as implementations
from millionway.model.compare import Comparison
from millionway.model.inputs import NotFiniteError
from millionway.model.passes import Passes
from millionway.model.products import computed_in
from millionway.model.row_store import FileStore, HostStore, Store
from millionway.model.rows import DeadRows, InverseNorms, KeptExponentials, Rows, rows_per_block, unit
from millionway.parallel import collectives
from millionway.parallel.group import Group
from millionway.parallel.layout import find_places, local_range
from millionway.settings.pretrain import Kernel, Precision

ROWS_DRAWN_AT_ONCE = 1 << 11


@dataclass
class _Pass:
    """What the update needs from the forward pass."""

    all_rows: Rows
    rows: Rows
    """those the pass ran over: all of them, or copies of the sampled ones"""
    chosen: Int[Tensor, " chosen"] | None
    """the places of the sampled ones among all; None is all of them"""
    unit_x: Float[Tensor, "batch dim"]
    pairs: Any
    pair_q: Float[Tensor, " pairs"]
    first: softmax.FirstPass
    z: Float[Tensor, " batch"]


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
        kernel: Kernel = "auto",
        precision: Precision = "float32",
        rows_in: str | Path = "device",
    ) -> None:
        """storage: dtype of rows and momentum; bfloat16 is rounded at random, and computed in float32.

        keep_bytes: budget for exponentials kept from the first pass to the second (0: always computed again). By
        default a quarter of the free memory on a CPU, and nothing elsewhere.
        classes_per_step: compare with that many sampled classes outside the batch (and the batch's own) instead of all.
        kernel: who computes the passes: the `torch` loop, the fused `triton` kernels for CUDA, or `auto`: the faster.
        precision: what their products compute in. On a CPU bfloat16 is faster where there are instructions for it, and
        exponentials are then bfloat16 too; anything else but float32 is emulated there, and slower.
        rows_in: where rows and momentum live: "device", "host" (memory) or the path of a file. Blocks of them come and
        go while others are worked on; the numbers are the same.
        """
        super().__init__()
        inputs.check_options(num_instances, dim, temperature, storage, keep_bytes, classes_per_step)
        implementations.check_choice(kernel, precision, rows_in)
        self.num_instances = num_instances
        self.dim = dim
        self.temperature = temperature
        self.group = group or Group()
        self.seed = seed
        self.classes_per_step = classes_per_step
        self.step = 0  # counts updates; sampled classes and rounding are functions of (seed, step)
        self.local_range = local_range(num_instances, self.group.rank, self.group.size)
        start, stop = self.local_range
        self.register_buffer("alive", torch.ones(stop - start, dtype=torch.bool, device=device))
        self.store = self._open_store(rows_in, storage)
        if self.store is None:
            weight = torch.empty(stop - start, dim, dtype=storage, device=device)
            velocity = torch.zeros_like(weight)
        else:
            weight, velocity = self.store.weight, self.store.velocity
        self.register_buffer("weight", weight)
        self.register_buffer("momentum", velocity)
        threads.on_each(self._draw, range(0, stop - start, ROWS_DRAWN_AT_ONCE), torch.device("cpu"))
        self._pass: _Pass | None = None
        self._kept = KeptExponentials(keep_bytes)
        self._inverse_norms = InverseNorms()
        self._dead_rows = DeadRows()
        self._half_written = False
        self.kernel: Kernel = kernel
        self.precision: Precision = precision
        self._passes: Passes | None = None

    def _open_store(self, rows_in: str | Path, storage: torch.dtype) -> Store | None:
        """None: on the device."""
        if rows_in == "device" or (rows_in == "host" and self.device.type == "cpu"):
            return None
        num_rows = len(self.alive)
        if rows_in == "host":
            return HostStore(num_rows, self.dim, storage, pinned=self.device.type == "cuda")
        return FileStore(Path(rows_in), self.num_instances, self.dim, storage, self.local_range)

    def _draw(self, first: int) -> None:
        """Normal numbers for some of the rows, a function of seed and class alone; their momentum is 0."""
        last, start = min(first + ROWS_DRAWN_AT_ONCE, len(self.weight)), self.local_range[0]
        key = randomness.key_of(self.seed, "rows")
        rows = randomness.normal(key, torch.arange(start + first, start + last), self.dim)
        if self.store is None:
            self.weight[first:last] = rows
        else:
            rows = rows.to(self.weight.dtype)
            self.store.write(first, rows)
            self.store.write(first, torch.zeros_like(rows), velocity=True)

    @property
    def device(self) -> torch.device:
        """That computes."""
        return self.alive.device

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
        x, ids = self._all_gather(embeddings, instance_ids)
        if self.classes_per_step is not None and hardest is not None and alpha > 0:
            raise ValueError("smoothing needs all classes; classes_per_step leaves most of them out")
        targets = inputs.targets_of(ids, hardest, alpha, group, self.local_range)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            unit_x, inverse_norm_x = unit(x)
            passes = self._chosen_passes(len(x))
            all_rows = self._rows(len(x))
            rows, chosen, places = all_rows, None, targets - all_rows.first_id  # a place outside is on another rank
            if self.classes_per_step is not None:
                key = randomness.key_of(self.seed, "classes", self.step)
                about = (all_rows.dead, self.local_range, self.num_instances, group)
                classes = sampled.draw(key, self.classes_per_step, ids, *about)
                rows, chosen, places = sampled.take(all_rows, classes, targets, self.local_range)
            pairs = passes.pairs(places, rows)
            shift = target_shift = None
            if tau < softmax.NO_SHIFT_ABOVE:
                largest = passes.largest_logits(unit_x, rows, pairs, tau)
                shift, target_shift = collectives.all_reduce_max(group, largest)
            kept_dtype = passes.kept_dtype(unit_x, tau) if storing else None
            kept = self._kept.room(len(x), rows, kept_dtype) if kept_dtype is not None else []
            first = passes.first_pass(unit_x, rows, pairs, tau, shift, kept)
            # What a target adds to the numerator: y e. Zero for targets whose rows are elsewhere.
            logits = first.pair_logits if target_shift is None else first.pair_logits - target_shift[pairs.samples]
            added = logits.new_zeros(targets.shape)  # [batch, targets]
            added.view(-1)[pairs.places] = logits.exp2()
            added *= inputs.label_weights(targets.shape[1], alpha, x)
            added[:, 0].masked_fill_(self._dead_here(ids), torch.nan)
            z, numerator = collectives.all_reduce(group, torch.stack([first.z, added.sum(dim=1)]))
            loss = z.log() - numerator.log()
            if shift is not None and target_shift is not None:
                loss += (shift - target_shift) / softmax.LOG2_E
            loss = loss.mean()
            q, gradient = added / numerator[:, None], None
            if storing:
                gradient = first.o / z[:, None] - softmax.weighted_rows(rows, places, q)
                gradient = self._share_of(gradient, unit_x, inverse_norm_x)
            # The host waits for the device here and nowhere else in a step; nothing has been written yet.
            trouble = inputs.find_trouble(x, targets, loss, self.num_instances)
            is_wrong, *bounds = torch.cat([trouble, pairs.unread]).tolist()
            if is_wrong:
                inputs.explain(x, targets, self.num_instances)
                self._check_alive(ids, numerator)
                raise NotFiniteError("a row of the classifier is not finite (NaN or infinity)")
            if gradient is None:
                return loss
        if bounds:
            pairs.bounds = bounds
        self._pass = _Pass(all_rows, rows, chosen, unit_x, pairs, q.view(-1)[pairs.places], first, z)
        return _KnownGradient.apply(embeddings, loss, gradient.to(embeddings.dtype))

    def _share_of(self, gradient: Tensor, unit_x: Tensor, inverse_norm_x: Tensor) -> Float[Tensor, "own dim"]:
        """With respect to this rank's embeddings, from that by the rows here with respect to all unit embeddings."""
        gradient = collectives.reduce_scatter(self.group, gradient / (self.temperature * len(unit_x)))
        own = slice(self.group.rank * len(gradient), (self.group.rank + 1) * len(gradient))
        along = (unit_x[own] * gradient).sum(dim=1, keepdim=True)
        return (gradient - unit_x[own] * along) * inverse_norm_x[own]

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
        self._half_written = True
        with torch.autocast(self.device.type, enabled=False):
            self._chosen_passes(len(stored.unit_x)).second_pass(
                stored.unit_x,
                stored.rows,
                stored.pairs,
                stored.pair_q,
                stored.first,
                stored.z,
                self.temperature,
                move,
            )
        if stored.chosen is not None:
            sampled.put_back(stored.all_rows, stored.rows, stored.chosen)
        self._half_written = False
        self._inverse_norms.follow(self.weight)
        self.step += 1

    @torch.no_grad()
    def hardest(self, k: int) -> Int[Tensor, "classes k"]:
        """The k classes whose rows are most similar to each row, itself excluded: int32 ids, most similar first."""
        num_others = int(collectives.all_reduce(self.group, self.alive.sum())) - 1
        if not 0 < k <= num_others:
            raise ValueError(f"k must be from 1 to {num_others}, the number of other classes, not {k}")
        with torch.autocast(self.device.type, enabled=False):
            alive = self.alive.to(self.weight.device)
            return hardest_search.top_k(self.weight, k, alive, self.group, self.num_instances).to(self.device)

    def num_ahead(
        self, embeddings: Float[Tensor, "batch dim"], instance_ids: Int[Tensor, " batch"]
    ) -> Int[Tensor, " batch"]:
        """How many other classes score as high as its own, per embedding; 0 is a top-1 hit, below 5 a top-5 hit."""
        return self.compare(embeddings, instance_ids).num_ahead

    ranks = num_ahead

    @torch.no_grad()
    def compare(self, embeddings: Float[Tensor, "batch dim"], instance_ids: Int[Tensor, " batch"]) -> Comparison:
        """Each embedding with all rows."""
        x, ids = self._all_gather(embeddings, instance_ids)
        with torch.autocast(x.device.type, enabled=False):
            unit_x, _ = unit(x)
            rows = self._rows(len(x))
            with computed_in("float32"):
                own = compare.own_cosines(unit_x, ids, rows, self.group)
                result = compare.with_all(unit_x, ids, own, rows, self.group)
            if bool(inputs.find_trouble(x, ids[:, None], own.sum(), self.num_instances)):
                inputs.explain(x, ids[:, None], self.num_instances)
                self._check_alive(ids, own)
            return result

    @torch.no_grad()
    def take_rows(self, other: "InstanceClassifier") -> None:
        """Rows and momentum of another classifier under the same numbers; it may have another number of classes."""
        start, stop = self.local_range
        state = (other.weight, other.momentum)
        for first, (rows, velocity) in collectives.ring(other.group, other.num_instances, *state):
            ids = torch.arange(first, first + len(rows), device=rows.device)
            places, here = find_places(ids, start, stop)
            self.weight[places[here]] = rows[here]
            self.momentum[places[here]] = velocity[here]
        self.step = other.step

    @torch.no_grad()
    def set_rows(self, instance_ids: Int[Tensor, " n"], rows: Float[Tensor, "n dim"]) -> None:
        """Write rows as they are: those of the given classes that live here. No other rank is needed for it."""
        inputs.check_form(rows, instance_ids, self.dim)
        inputs.check_ids(instance_ids, self.num_instances, "instance ids")
        inputs.check_finite(rows, instance_ids)
        places, here = find_places(instance_ids, *self.local_range)
        values = rows[here].detach().to(self.compute_dtype).to(self.weight.device, self.weight.dtype)
        self.weight[places[here].to(self.weight.device)] = values

    def _all_gather(self, embeddings: Tensor, instance_ids: Tensor) -> tuple[Tensor, Tensor]:
        """All ranks' embeddings, in the dtype of the arithmetic, and their ids. Their values are checked later."""
        inputs.check_form(embeddings, instance_ids, self.dim)
        own = embeddings.detach().to(self.compute_dtype), instance_ids.to(self.device)
        x, ids = collectives.all_gather_together(self.group, *own)
        return x, ids

    def _rows(self, batch: int) -> Rows:
        """All rows of this rank, in blocks for a batch of this size."""
        if self._half_written:
            raise RuntimeError("an update failed half-way, so some rows have moved and others not: load a checkpoint")
        inverse_norm = self._inverse_norms.of(self.weight, self.compute_dtype, self.device, self.store)
        block, dead = rows_per_block(batch, self.device), self._dead_rows.of(self.alive)
        return Rows(self.weight, self.momentum, inverse_norm, block, dead, self.local_range[0], self.store)

    def _chosen_passes(self, batch: int) -> Passes:
        """By what is fastest here, if that is left open; the same on all ranks, from the first step on."""
        if self._passes is None:
            kind = (self.device, self.dim, self.weight.dtype, self.precision, batch, self.temperature)
            kernel = self.kernel if self.store is None else "torch"  # the kernels need all rows on the device
            chosen = implementations.choose(kernel, *kind)
            is_open = kernel == "auto" and self.device.type == "cuda"
            if is_open and collectives.any_rank(self.group, isinstance(chosen, implementations.TorchPasses)):
                chosen = implementations.TorchPasses(self.precision)
            self._passes = chosen
        return self._passes

    def _dead_here(self, ids: Tensor) -> Bool[Tensor, " batch"]:
        """Which of these classes have a dead row here."""
        places, here = find_places(ids, *self.local_range)
        return here & ~self.alive[places] if len(self.alive) else torch.zeros_like(here)

    def _check_alive(self, ids: Tensor, numbers: Tensor) -> None:
        """A dead class of any rank has left a NaN here, as a row that is not finite does; so all ranks complain."""
        wrong = torch.isnan(numbers)
        is_dead = self._dead_here(ids).to(torch.int32)
        dead = ids[collectives.all_reduce(self.group, is_dead) > 0]
        if len(dead):
            raise ValueError(f"instance {int(dead[0])} of the batch is not alive")
        if bool(wrong.any()):
            raise NotFiniteError(f"the row of instance {int(ids[wrong][0])} is not finite (NaN or infinity)")

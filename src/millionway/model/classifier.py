"""The million-way classifier: one row per image, a cosine softmax over all of them.

    cos_ij = <w_j, x_i> / (|w_j| |x_i|)        e_ij = exp(cos_ij / tau)        Z_i = sum over all j of e_ij
    J = -(1/B) sum_i log( sum_j y_ij e_ij / Z_i )
    y_ii = 1 - alpha,  y_ij = alpha / K for the K hardest classes j of i,  else 0

The logarithm is outside the sum. The gradient with respect to cos_ij / tau is (p_ij - q_ij) / B with p = e / Z and
q_ij = y_ij e_ij / sum_k y_ik e_ik. A vector shorter than 1e-12 counts as zero: cosine 0, gradient 0.

This is the plain form: all [batch, classes] cosines are in memory at once.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from millionway import randomness
from millionway.model import hardest as hardest_search
from millionway.parallel.group import Group
from millionway.parallel.layout import local_range

TINY_NORM = 1e-12


class NotFiniteError(ValueError):
    """Embeddings with NaN or infinity reached the classifier."""


def unit(x: Float[Tensor, "n dim"]) -> tuple[Float[Tensor, "n dim"], Float[Tensor, "n 1"]]:
    """Vectors of length 1 and the inverse lengths; the zero vector and 0 for vectors that are too short."""
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    inverse = torch.where(norm < TINY_NORM, torch.zeros_like(norm), 1 / norm.clamp(min=TINY_NORM))
    return x * inverse, inverse


@dataclass
class _Pass:
    """What the update needs from the forward pass."""

    classes: Int[Tensor, " chosen"] | None  # None is all of them
    unit_embeddings: Float[Tensor, "batch dim"]
    logit_gradient: Float[Tensor, "batch chosen"]  # d loss / d cosine


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
        """keep_bytes: budget for exponentials kept from forward to update; the plain form keeps them always.

        classes_per_step: compare with that many sampled classes outside the batch (and the batch's own) instead of all.
        """
        super().__init__()
        if num_instances < 1 or dim < 1:
            raise ValueError(f"a classifier needs at least one instance and one dimension, not {num_instances} x {dim}")
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, not {temperature}")
        if storage not in (torch.float32, torch.float64):
            raise ValueError(f"storage must be torch.float32 or torch.float64, not {storage}")
        if classes_per_step is not None and classes_per_step < 1:
            raise ValueError(f"classes_per_step must be positive, not {classes_per_step}")
        self.num_instances = num_instances
        self.dim = dim
        self.temperature = temperature
        self.group = group or Group()
        self.keep_bytes = keep_bytes
        self.seed = seed
        self.classes_per_step = classes_per_step
        self.step = 0  # counts updates; sampled classes are a function of (seed, step)
        self.local_range = local_range(num_instances, self.group.rank, self.group.size)
        start, stop = self.local_range
        rows = randomness.normal(randomness.key_of(seed, "rows"), torch.arange(start, stop), dim)
        self.register_buffer("weight", rows.to(device, storage))
        self.register_buffer("momentum", torch.zeros_like(self.weight))
        self.register_buffer("alive", torch.ones(stop - start, dtype=torch.bool, device=device))
        self._pass: _Pass | None = None

    def forward(
        self,
        embeddings: Float[Tensor, "batch dim"],
        instance_ids: Int[Tensor, " batch"],
        hardest: Int[Tensor, "classes k"] | None = None,
        alpha: float = 0.0,
    ) -> Float[Tensor, ""]:
        """The mean loss over the batch. In grad mode it also stores what `update` needs."""
        if torch.is_grad_enabled() and self._pass is not None:
            raise RuntimeError("the last forward pass has not been used: call update() before the next one")
        x = self._checked(embeddings, instance_ids)
        targets, shares = self._targets(instance_ids, hardest, alpha)
        classes = self._sampled_classes(instance_ids)
        rows = self.weight if classes is None else self.weight[classes]
        # Position of each target class among the chosen rows. With all classes it is the class itself.
        columns = targets if classes is None else torch.searchsorted(classes, targets)

        with torch.autocast(x.device.type, enabled=False):
            unit_x, inverse_norm_x = unit(x)
            unit_rows, _ = unit(rows)
            logits = unit_x @ unit_rows.T / self.temperature  # [batch, classes]
            alive = self.alive if classes is None else self.alive[classes]
            logits = logits.masked_fill(~alive, -torch.inf)
            log_z = torch.logsumexp(logits, dim=1, keepdim=True)  # [batch, 1]
            target_logits = logits.gather(1, columns) + torch.log(shares)  # [batch, k + 1]
            log_numerator = torch.logsumexp(target_logits, dim=1, keepdim=True)
            loss = (log_z - log_numerator).mean()
            if not torch.is_grad_enabled():
                return loss
            p = torch.exp(logits - log_z)
            q = torch.exp(target_logits - log_numerator)
            logit_gradient = p.scatter_add_(1, columns, -q) / (len(x) * self.temperature)
            gradient = logit_gradient @ unit_rows  # with respect to the unit embedding
            gradient = (gradient - unit_x * (unit_x * gradient).sum(1, keepdim=True)) * inverse_norm_x
        self._pass = _Pass(classes, unit_x, logit_gradient)
        return _KnownGradient.apply(embeddings, loss, gradient.to(embeddings.dtype))

    @torch.no_grad()
    def update(self, lr: float, momentum: float = 0.9, weight_decay: float = 1e-4) -> None:
        """One step of SGD on the rows, from the stored forward pass. Rows dead or not sampled stay as they are."""
        if self._pass is None:
            raise RuntimeError("update() needs a forward pass in grad mode before it")
        unit_x, logit_gradient = self._pass.unit_embeddings, self._pass.logit_gradient
        if self._pass.classes is None:
            moving = self.alive.nonzero()[:, 0]
            logit_gradient = logit_gradient[:, moving]
        else:
            moving = self._pass.classes
        rows = self.weight[moving]
        unit_rows, inverse_norm = unit(rows)
        gradient = logit_gradient.T @ unit_x  # with respect to the unit row
        gradient = (gradient - unit_rows * (unit_rows * gradient).sum(1, keepdim=True)) * inverse_norm
        velocity = momentum * self.momentum[moving] + gradient + weight_decay * rows
        self.momentum[moving] = velocity
        self.weight[moving] = rows - lr * velocity
        self._pass = None
        self.step += 1

    @torch.no_grad()
    def hardest(self, k: int) -> Int[Tensor, "classes k"]:
        """The k classes whose rows are most similar to each row, itself excluded: int32 ids, most similar first."""
        num_others = int(self.alive.sum()) - 1
        if not 0 < k <= num_others:
            raise ValueError(f"k must be from 1 to {num_others}, the number of other classes, not {k}")
        return hardest_search.top_k(self.weight, k, self.alive)

    @torch.no_grad()
    def ranks(
        self, embeddings: Float[Tensor, "batch dim"], instance_ids: Int[Tensor, " batch"]
    ) -> Int[Tensor, " batch"]:
        """How many other classes score as high as its own, per embedding; 0 is a top-1 hit, below 5 a top-5 hit."""
        x = self._checked(embeddings, instance_ids)
        with torch.autocast(x.device.type, enabled=False):
            cosines = (unit(x)[0] @ unit(self.weight)[0].T).masked_fill(~self.alive, -torch.inf)
        rounding = 1e-12 if cosines.dtype == torch.float64 else 1e-6
        return (cosines > cosines.gather(1, instance_ids[:, None]) - rounding).sum(dim=1) - 1

    @torch.no_grad()
    def set_rows(self, instance_ids: Int[Tensor, " n"], rows: Float[Tensor, "n dim"]) -> None:
        """Write rows as they are."""
        self._checked(rows, instance_ids)
        self.weight[instance_ids] = rows.to(self.weight.dtype)

    def _checked(self, vectors: Tensor, instance_ids: Tensor) -> Tensor:
        """The vectors, detached, in the rows' dtype; a ValueError names what is wrong with them or their ids."""
        if vectors.ndim != 2 or vectors.shape[1] != self.dim or len(vectors) == 0:
            raise ValueError(f"expected vectors of shape [batch, {self.dim}], not {list(vectors.shape)}")
        if instance_ids.dtype != torch.int64 or instance_ids.shape != vectors.shape[:1]:
            raise ValueError(
                f"expected {len(vectors)} int64 instance ids, not {instance_ids.dtype} {list(instance_ids.shape)}"
            )
        low, high = int(instance_ids.min()), int(instance_ids.max())
        if low < 0 or high >= self.num_instances:
            raise ValueError(f"instance ids run from {low} to {high}, but there are {self.num_instances} instances")
        if not bool(self.alive[instance_ids].all()):
            raise ValueError("an instance of the batch is not alive")
        if not bool(torch.isfinite(vectors).all()):
            raise NotFiniteError("the embeddings are not finite (NaN or infinity)")
        return vectors.detach().to(self.weight.dtype)

    def _targets(
        self, instance_ids: Tensor, hardest: Tensor | None, alpha: float
    ) -> tuple[Int[Tensor, "batch targets"], Float[Tensor, " targets"]]:
        """Classes with a share of the label, and the shares: the instance itself and, smoothed, its hardest classes."""
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha must be at least 0 and below 1, not {alpha}")
        own = instance_ids[:, None]
        if hardest is None or alpha == 0:
            return own, torch.ones(1, dtype=self.weight.dtype, device=self.weight.device)
        if self.classes_per_step is not None:
            raise ValueError("smoothing needs all classes; classes_per_step leaves most of them out")
        if len(hardest) != len(self.weight):
            raise ValueError(f"the table of hardest classes has {len(hardest)} rows, the classifier {len(self.weight)}")
        k = hardest.shape[1]
        shares = torch.full((k + 1,), alpha / k, dtype=self.weight.dtype, device=self.weight.device)
        shares[0] = 1 - alpha
        return torch.cat([own, hardest[instance_ids].to(torch.int64)], dim=1), shares

    def _sampled_classes(self, instance_ids: Tensor) -> Int[Tensor, " chosen"] | None:
        """Ascending ids of the batch's own classes and `classes_per_step` others, drawn without replacement."""
        if self.classes_per_step is None:
            return None
        everyone = torch.arange(self.num_instances, device=self.weight.device)
        lottery = randomness.uniform(randomness.key_of(self.seed, "classes", self.step), everyone, 1)[:, 0]
        lottery[~self.alive] = 2.0
        lottery[instance_ids] = -1.0  # always in
        num_own = int((lottery < 0).sum())
        num_alive = int(self.alive.sum())
        chosen = torch.argsort(lottery, stable=True)[: min(num_own + self.classes_per_step, num_alive)]
        return chosen.sort().values

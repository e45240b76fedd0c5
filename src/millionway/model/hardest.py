"""Exact top-K among rows. Never [classes, classes] in memory."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK_ROWS = 1024
MARGIN = 1e-5  # float32 cosines are right to about this; what is nearer to the K-th is scored again in float64


def top_k(rows: Float[Tensor, "classes dim"], k: int, alive: Bool[Tensor, " classes"]) -> Int[Tensor, "classes k"]:
    """Ids of the k most similar other rows, by cosine, most similar first, ties by lower id; dead rows left out."""
    exact = _unit(rows.to("cpu" if rows.device.type == "mps" else rows.device, torch.float64))  # MPS has no float64
    fast = exact.to(rows.device, torch.float32)
    result = torch.empty(len(rows), k, dtype=torch.int32, device=rows.device)
    for start in range(0, len(rows), BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, len(rows))
        cosines = fast[start:stop] @ fast.T  # [block, classes]
        cosines.masked_fill_(~alive, -torch.inf)
        itself = torch.arange(start, stop, device=rows.device)
        cosines[itself - start, itself] = -torch.inf
        result[start:stop] = _top_k_of_block(cosines, exact[start:stop], exact, k)
    return result


def _top_k_of_block(cosines: Tensor, queries: Tensor, exact: Tensor, k: int) -> Tensor:
    """Candidates in float32, more than k; then their order in float64."""
    num_candidates = min(k + 16, cosines.shape[1])
    values, candidates = cosines.topk(num_candidates, dim=1)
    best = _order(values, candidates, queries, exact, k)
    if num_candidates < cosines.shape[1]:
        # Where the last candidate is as good as the k-th, as among duplicates, there may be more: row by row.
        kth = values[:, k - 1 : k] - MARGIN
        for row in (values[:, -1:] >= kth).nonzero()[:, 0].tolist():
            near = (cosines[row] >= kth[row]).nonzero()[:, 0]
            best[row] = _order(cosines[row, near][None], near[None], queries[row : row + 1], exact, k)[0]
    return best


def _order(values: Tensor, candidates: Tensor, queries: Tensor, exact: Tensor, k: int) -> Tensor:
    """The first k candidates by (cosine in float64, lower id)."""
    candidates, order = candidates.sort(dim=1)
    left_out = torch.isinf(values.gather(1, order)).to(exact.device)
    rows = exact[candidates.to(exact.device)]  # [queries, candidates, dim]
    scores = torch.einsum("bd,bcd->bc", queries, rows).masked_fill(left_out, -torch.inf)
    best = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    return candidates.gather(1, best.to(candidates.device)).to(torch.int32)


def _unit(rows: Tensor) -> Tensor:
    return F.normalize(rows, eps=1e-12)

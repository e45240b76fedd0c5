"""Who owns which rows; pure arithmetic."""

from torch import Tensor


def local_range(num_instances: int, rank: int, size: int) -> tuple[int, int]:
    """(start, stop) of a rank's classes: ceil(N / size) each, as torch.chunk cuts; the last may own fewer, or none."""
    per_rank = -(-num_instances // size)
    return min(rank * per_rank, num_instances), min((rank + 1) * per_rank, num_instances)


def find_places(ids: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Where these classes are among the rows start : stop, and whether they are there (if not, the place is any)."""
    here = (ids >= start) & (ids < stop)
    return (ids.long() - start).clamp(0, max(0, stop - start - 1)), here

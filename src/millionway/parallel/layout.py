"""Who owns which rows; pure arithmetic."""


def local_range(num_instances: int, rank: int, size: int) -> tuple[int, int]:
    """(start, stop) of a rank's classes: ceil(N / size) each, as torch.chunk cuts; the last may own fewer, or none."""
    share = -(-num_instances // size)
    return min(rank * share, num_instances), min((rank + 1) * share, num_instances)

"""What torchrun tells the processes it starts. Without it, there is one."""

import os


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """The number of this process on its machine, by which it takes its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def global_rank() -> int:
    """The number of this process among all."""
    return int(os.environ.get("RANK", "0"))


def is_first_process() -> bool:
    """Whether this process speaks for all, also before they have met and after they have parted."""
    return global_rank() == 0


def times_restarted() -> int:
    """How often torchrun has started the processes again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

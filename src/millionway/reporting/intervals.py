"""How sure is a mean, and how is it shown?"""

import math
import statistics
from collections.abc import Sequence

INTERVAL = "half_of_95_percent_interval"  # in files of results
PLAIN_NUMBERS = ("effective_rank", "alignment", "uniformity", "positive_cosine", "hardest_negative_cosine")


def half_interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean of at least two values, by Student's t."""
    from scipy.stats import t

    return float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def shown(name: str, value: float | str, half: float | None = None) -> str:
    """A number of a protocol as people read it, with its interval: most are shares."""
    if isinstance(value, str):
        return value
    form = ".2f" if name in PLAIN_NUMBERS else ".2%"
    if half is None:
        return f"{value:{form}}"
    return f"{value:{form}} with every seed" if half == 0 else f"{value:{form}} ± {half:{form}}"

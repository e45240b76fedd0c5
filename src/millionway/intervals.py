"""How sure is a mean?"""

import math
import statistics
from collections.abc import Sequence


def half_interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean of at least two values, by Student's t."""
    from scipy.stats import t

    return float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))

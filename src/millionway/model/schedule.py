"""Learning rate as a function of the step."""

import math


def learning_rate(step: int, num_steps: int, num_warmup_steps: int, peak: float) -> float:
    """Linear from peak / warm-up to peak, then cosine to 0."""
    if step < num_warmup_steps:
        return peak * (step + 1) / num_warmup_steps
    progress = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))

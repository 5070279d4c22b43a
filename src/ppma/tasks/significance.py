"""Whether two sets of runs differ by more than their seeds."""

import math
import statistics
from collections.abc import Sequence

_STEPS = 20_000


def welch_p(first: Sequence[float], second: Sequence[float]) -> float:
    """The two-sided p-value of Welch's t-test: means of two samples whose variances may differ.

    Args:
        first: at least 2 values.
        second: at least 2 values.

    Returns:
        The probability of means at least so far apart if the two have the same expectation; NaN for fewer values.

    Examples:
        >>> from ppma.tasks.significance import welch_p
        >>> round(welch_p([96.8, 95.0, 96.9], [79.8, 76.8, 78.4]), 6)
        0.000146
    """
    if min(len(first), len(second)) < 2:
        return math.nan
    errors = [statistics.variance(sample) / len(sample) for sample in (first, second)]
    difference = statistics.mean(first) - statistics.mean(second)
    if sum(errors) == 0:
        return 1.0 if difference == 0 else 0.0
    freedom = sum(errors) ** 2 / sum(e**2 / (len(s) - 1) for e, s in zip(errors, (first, second), strict=True))
    # Student's density with t = sqrt(freedom) tan(angle) is proportional to cos(angle) ** (freedom - 1).
    start = math.atan(abs(difference) / math.sqrt(sum(errors) * freedom))
    width = (math.pi / 2 - start) / _STEPS
    tail = width * sum(math.cos(start + (step + 0.5) * width) ** (freedom - 1) for step in range(_STEPS))
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return min(1.0, 2 * scale * tail)

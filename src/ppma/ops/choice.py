"""Choice of an implementation by measurement: which one is fastest depends on the shape and the CPU."""

import time
from collections.abc import Callable, Mapping

MARGIN = 1.05  # another implementation must be faster than the first by this factor: the measurement is short


def fastest(candidates: Mapping[str, Callable[[], object]], rounds: int = 3) -> str:
    """The name of the fastest candidate by its best of some interleaved rounds; the first wins within `MARGIN`."""
    best = dict.fromkeys(candidates, float("inf"))
    for candidate in candidates.values():
        candidate()
    for _ in range(rounds):
        for name, candidate in candidates.items():
            start = time.perf_counter()
            candidate()
            best[name] = min(best[name], time.perf_counter() - start)
    first = next(iter(best))
    return min(best, key=lambda name: best[name] * (1.0 if name == first else MARGIN))


def rounded_down(count: int) -> int:
    """A power of two, so that images of many sizes do not measure again and again."""
    return 1 << max(0, count.bit_length() - 1)

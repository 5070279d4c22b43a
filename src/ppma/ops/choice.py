"""Choice of an implementation by measurement: which one is fastest depends on the shape and the CPU."""

import time
from collections.abc import Callable, Mapping

MARGIN = 1.05  # another implementation must be faster than the first by this factor


def fastest(candidates: Mapping[str, Callable[[], object]], *, margin: float = MARGIN, rounds: int = 3) -> str:
    """The name of the fastest candidate in some interleaved rounds.

    The first one is kept unless another beats it by `margin` in every round: the measurement is short, cores change
    their speed meanwhile, and the result is used for as long as the process lives.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for candidate in candidates.values():
        candidate()
    for _ in range(rounds):
        for name, candidate in candidates.items():
            start = time.perf_counter()
            candidate()
            seconds[name].append(time.perf_counter() - start)
    first = next(iter(candidates))
    better = [
        name
        for name in candidates
        if all(margin * other < own for other, own in zip(seconds[name], seconds[first], strict=True))
    ]
    return min((first, *better), key=lambda name: min(seconds[name]))


def rounded_down(count: int) -> int:
    """A power of two, so that images of many sizes do not measure again and again."""
    return 1 << max(0, count.bit_length() - 1)

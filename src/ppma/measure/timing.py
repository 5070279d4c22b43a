"""Timing for noisy machines: contenders take turns, and ratios are taken within a round."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ppma.progress import Progress


@dataclass(frozen=True)
class Timings:
    """Measured times.

    Attributes:
        seconds: contender -> seconds of one run, one value per round.
    """

    seconds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        """Median seconds."""
        return statistics.median(self.seconds[name])

    def speed(self, name: str, than: str) -> float:
        """How many times faster `name` is than `than`: the median of the ratios within the rounds."""
        return statistics.median(self._ratios(name, than))

    def spread(self, name: str, than: str) -> float:
        """Half the distance between the quartiles of the ratios whose median is `speed`; 0 for a single round."""
        ratios = self._ratios(name, than)
        if len(ratios) < 2:
            return 0.0
        low, _, high = statistics.quantiles(ratios, n=4)
        return (high - low) / 2

    def _ratios(self, name: str, than: str) -> list[float]:
        return [b / a for a, b in zip(self.seconds[name], self.seconds[than], strict=True)]


def synchronize(device: torch.device | None) -> None:
    """Wait for pending work on the device."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 9,
    shortest: float = 0.02,
    device: torch.device | None = None,
    label: str = "",
    on_round: Callable[[Timings], None] | None = None,
) -> Timings:
    """Time the contenders in turns, every other round backwards: A, B, C, C, B, A, ...

    So neighbours stay neighbours, and a machine that becomes slower or faster favours no one.

    Args:
        contenders: name -> function to time.
        rounds: timings per contender.
        shortest: a faster contender is repeated within a round for at least this many seconds.
        device: synchronised around each timing.
        label: title of the progress line.
        on_round: called after each round with all timings up to then.

    Returns:
        Seconds of one run of each contender, per round.

    Examples:
        >>> from ppma.measure.timing import interleave
        >>> timings = interleave({"sum": lambda: sum(range(100)), "len": lambda: len(range(100))}, rounds=3)
        >>> len(timings.seconds["sum"])
        3
    """
    repeats = {}
    timings = Timings({name: [] for name in contenders})
    with Progress(label, (1 + rounds) * len(contenders)) as progress:
        for name, run in contenders.items():
            run()
            repeats[name] = max(1, round(shortest / max(_seconds(run, 1, device), 1e-7)))
            progress.advance(name)
        for turn in range(rounds):
            in_turn = list(contenders.items())
            for name, run in in_turn if turn % 2 == 0 else reversed(in_turn):
                timings.seconds[name].append(_seconds(run, repeats[name], device))
                progress.advance(name)
            if on_round is not None:
                on_round(timings)
    return timings


def _seconds(run: Callable[[], object], repeats: int, device: torch.device | None) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / repeats

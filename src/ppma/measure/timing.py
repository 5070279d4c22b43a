"""Timing that holds on a noisy machine: contenders take turns, and what counts is the ratio within a round."""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timings:
    """Seconds of every contender, one for each round."""

    seconds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        """Median seconds."""
        return statistics.median(self.seconds[name])

    def speed(self, name: str, than: str) -> float:
        """How many times as fast `name` is as `than`: the median of the ratios within the rounds."""
        return statistics.median(b / a for a, b in zip(self.seconds[name], self.seconds[than], strict=True))


def synchronize(device: torch.device | None) -> None:
    """Wait until the device has finished."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 9,
    shortest: float = 0.02,
    device: torch.device | None = None,
    label: str = "",
) -> Timings:
    """Time the contenders in turns: A, B, A, B, ...

    Args:
        contenders: what to run, by name.
        rounds: how often each is timed.
        shortest: a contender that is faster is repeated within a round until this many seconds have gone by.
        device: where the work happens.
        label: shown while it runs.

    Returns:
        The seconds of one run of each contender, by round.
    """
    repeats = {}
    for name, run in contenders.items():
        run()
        repeats[name] = max(1, round(shortest / max(_seconds(run, 1, device), 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for done in range(rounds):
        if sys.stderr.isatty():
            print(f"\r{label}: round {done + 1} of {rounds} ", end="", file=sys.stderr, flush=True)
        for name, run in contenders.items():
            seconds[name].append(_seconds(run, repeats[name], device))
    if sys.stderr.isatty():
        print("\r" + " " * (len(label) + 24) + "\r", end="", file=sys.stderr, flush=True)
    return Timings(seconds)


def _seconds(run: Callable[[], object], repeats: int, device: torch.device | None) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / repeats

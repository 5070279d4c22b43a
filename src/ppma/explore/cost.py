"""Measure and plot time and memory of a product with the mask against the number of tokens."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppma.explore import style
from ppma.measure.costs import METHODS, exponent
from ppma.measure.memory import peak
from ppma.measure.timing import interleave
from ppma.ops import checks, polyline_scan
from ppma.progress import track

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHANNELS = 16
SMALLEST_PEAK = 100_000  # bytes; less than this is noise, since the resident set grows in pages


@dataclass(frozen=True)
class Contender:
    """A method to multiply by the V2H mask.

    Attributes:
        label: name and complexity, for the legend.
        run: (x, log_alpha, log_beta) -> mask times x.
        sides: grid sides on which it finishes in reasonable time.
    """

    label: str
    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    sides: tuple[int, ...]


def _scan(x: Tensor, log_alpha: Tensor, log_beta: Tensor) -> Tensor:
    return polyline_scan(x, log_alpha, log_beta, paths="v2h")


def _as_power(cost: str) -> str:
    """Typeset the exponent in "O(N^1.5)"."""
    return re.sub(r"N\^([\d.]+)", r"$N^{\1}$", cost)


_SIDES = ((4, 6, 8, 12), (8, 16, 32, 64), (8, 16, 32, 64, 128, 256), (8, 16, 32, 64, 128, 256, 512))
_RUNS = (*(method.run for method in METHODS[:3]), _scan)
CONTENDERS = {
    method.name: Contender(f"{method.name}: {_as_power(method.cost)}", run, sides)
    for method, run, sides in zip(METHODS, _RUNS, _SIDES, strict=True)
}


def call(name: str, side: int) -> Callable[[], Tensor]:
    """A function that runs one product on a side x side grid: 16 channels, float64 like the reference."""
    checks.one_of("method", name, CONTENDERS)
    generator = torch.Generator().manual_seed(0)
    log_alpha, log_beta = -torch.rand(2, side, side, generator=generator, dtype=torch.float64)
    x = torch.randn(side, side, CHANNELS, generator=generator, dtype=torch.float64)

    def run() -> Tensor:
        with torch.inference_mode():
            return CONTENDERS[name].run(x, log_alpha, log_beta)

    return run


@dataclass(frozen=True)
class Cost:
    """Cost of one method on growing grids.

    Attributes:
        sides: sides of the square grids.
        seconds: median time on each grid.
        peak_bytes: peak memory on each grid, excluding inputs and libraries; empty if not measured.
    """

    sides: tuple[int, ...]
    seconds: tuple[float, ...]
    peak_bytes: tuple[int, ...] = ()


def measure(largest: int = 256, *, rounds: int = 5, memory: bool = True) -> dict[str, Cost]:
    """Time every method on its grids.

    Args:
        largest: side of the largest grid.
        rounds: timings per grid, interleaved.
        memory: also measure peak memory, in a separate process each (Linux).

    Returns:
        Method name -> cost.
    """
    costs = {}
    for name, contender in CONTENDERS.items():
        sides = tuple(side for side in contender.sides if side <= largest)
        if not sides:
            raise ValueError(f"largest: expected a side of at least {contender.sides[0]}, got {largest}")
        timings = interleave({str(side): call(name, side) for side in sides}, rounds=rounds, label=name)
        measured = track(sides if memory else (), f"{name}, memory")
        peaks = tuple(peak("ppma.explore.cost:call", name, side, warm=True) for side in measured)
        costs[name] = Cost(sides, tuple(timings.median(str(side)) for side in sides), peaks)
    return costs


def cost_figure(costs: Mapping[str, Cost]) -> "Figure":
    """Log-log plots of time and, if measured, peak memory against N, with the fitted exponents in the legend.

    Peaks too small to measure are left out.

    Args:
        costs: from `measure`.
    """
    colours = (style.VERMILION, style.ORANGE, style.BLUE, style.GREEN)
    with_memory = all(cost.peak_bytes for cost in costs.values())
    figure = style.new_figure(10.4 if with_memory else 5.4, 5.2)
    axes = figure.subplots(1, 2 if with_memory else 1, squeeze=False)[0]
    titles = ("time (ms)", "peak memory (MB)")
    for column, axis in enumerate(axes):
        for (name, cost), colour, marker in zip(costs.items(), colours, "os^D", strict=False):
            points = _milliseconds(cost) if column == 0 else _megabytes(cost)
            sides, values = list(points), list(points.values())
            label = f"{CONTENDERS[name].label}, measured $N^{{{_slope(sides, values):.2f}}}$"
            tokens = [side * side for side in sides]
            axis.loglog(tokens, values, marker=marker, color=colour, label=label)
        axis.set_xlabel("tokens N")
        axis.set_title(titles[column], fontsize=11)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
    return figure


def _milliseconds(cost: Cost) -> dict[int, float]:
    return {side: 1e3 * value for side, value in zip(cost.sides, cost.seconds, strict=True)}


def _megabytes(cost: Cost) -> dict[int, float]:
    measurable = zip(cost.sides, cost.peak_bytes, strict=True)
    return {side: value / 1e6 for side, value in measurable if value >= SMALLEST_PEAK}


def _slope(sides: Sequence[int], values: Sequence[float]) -> float:
    """The exponent between the two largest grids, where fixed costs matter least."""
    return exponent(sides[-2:], values[-2:]) if len(sides) > 1 else float("nan")

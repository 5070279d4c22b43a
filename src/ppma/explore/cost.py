"""Count, measure and plot the cost of a product with the mask against the number of tokens."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppma.explore import style
from ppma.measure.costs import METHODS, count
from ppma.measure.memory import peak
from ppma.measure.timing import interleave
from ppma.ops import checks, polyline_scan
from ppma.progress import track

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHANNELS = 16
MOST_COUNTED = 64  # side of the largest grid whose multiplications are counted
SMALLEST_PEAK = 100_000  # bytes; less than this is noise, since the resident set grows in pages

Points = dict[int, float]  # side of the grid -> value


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


def cost_figure(costs: Mapping[str, Cost], *, width: float = style.PAGE) -> "Figure":
    """Log-log plots of multiplications, time and, if measured, peak memory against N.

    Multiplications are counted while the code runs, with one channel; their slopes are the exponents of the legend.
    Times and peaks have fixed costs too, and peaks too small to measure are left out.

    Args:
        costs: from `measure`.
        width: of the figure, in inches.
    """
    columns: dict[str, Callable[[str, Cost], Points]] = {"multiplications": _counted, "time (ms)": _milliseconds}
    if all(cost.peak_bytes for cost in costs.values()):
        columns["peak memory (MB)"] = _megabytes
    across = style.columns_of(len(columns), width / 1.6)
    rows = -(-len(columns) // across)
    figure = style.new_figure(width, rows * 0.75 * width / across + 0.5)
    axes = figure.subplots(rows, across, squeeze=False).flatten()
    colours = (style.VERMILION, style.ORANGE, style.BLUE, style.GREEN)
    for axis, (title, points_of) in zip(axes, columns.items(), strict=False):
        for (name, cost), colour, marker in zip(costs.items(), colours, "os^D", strict=False):
            points = points_of(name, cost)
            tokens = [side * side for side in points]
            axis.loglog(
                tokens, list(points.values()), marker=marker, color=colour, linewidth=1.2, markersize=3,
                label=CONTENDERS[name].label,
            )  # fmt: skip
        axis.set_xlabel("tokens N", fontsize=style.FONT)
        axis.set_title(title, fontsize=style.FONT, pad=3)
        axis.tick_params(labelsize=style.SMALL)
        axis.grid(alpha=0.3, linewidth=0.5)
    for axis in axes[len(columns) :]:
        axis.set_axis_off()
    handles, labels = axes[0].get_legend_handles_labels()
    columns_of_legend = 2 if width >= 4 else 1
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns_of_legend, frameon=False, fontsize=style.SMALL
    )
    return figure


def _counted(name: str, cost: Cost) -> Points:
    """Multiplications for one channel, counted on every grid up to a side that takes a second."""
    method = next(method for method in METHODS if method.name == name)
    return {side: float(count(method, side)) for side in cost.sides if side <= MOST_COUNTED}


def _milliseconds(name: str, cost: Cost) -> Points:
    return {side: 1e3 * value for side, value in zip(cost.sides, cost.seconds, strict=True)}


def _megabytes(name: str, cost: Cost) -> Points:
    measurable = zip(cost.sides, cost.peak_bytes, strict=True)
    return {side: value / 1e6 for side, value in measurable if value >= SMALLEST_PEAK}

"""Growth of time and memory with the number of tokens N: fitted exponents of T ~ N^p."""

from collections.abc import Callable, Iterator, Sequence

import torch

import ppma
from ppma.bench.report import Report
from ppma.measure import costs
from ppma.measure.memory import peak
from ppma.measure.timing import interleave
from ppma.progress import track

CHANNELS = 16
# Operator -> grid sides to measure, theoretical exponent.
OPERATORS: dict[str, tuple[Sequence[int], float]] = {
    "polyline_scan": ((256, 512, 1024), 1.0),
    "linear_attention": ((256, 512, 1024), 1.0),
    "criss_cross_attention": ((64, 128, 256), 1.5),
    "polyline_attention": ((32, 64, 128), 2.0),
}


def call(operator: str, side: int) -> Callable[[], object]:
    """A function that runs an operator on a side x side grid."""
    torch.manual_seed(0)
    log_alpha, log_beta = -torch.rand(2, side, side)
    function = getattr(ppma, operator)
    values = torch.randn(1 if operator == "polyline_scan" else 3, side, side, CHANNELS).unbind(0)

    def run() -> object:
        with torch.inference_mode():
            return function(*values, log_alpha, log_beta)

    return run


def suite(*, rounds: int = 5) -> Iterator[Report]:
    """Measure each operator on growing grids, and count the multiplications of a product with the mask."""
    report = Report(
        f"growth with N, forward, one head of {CHANNELS} channels",
        ["operator", "theory", "time exponent", "memory exponent", "sides", "ms", "peak MB"],
    )
    for operator, (sides, theory) in OPERATORS.items():
        timings = interleave({str(s): call(operator, s) for s in sides}, rounds=rounds, label=f"scaling {operator}")
        seconds = [timings.median(str(side)) for side in sides]
        measured = track(sides, f"scaling {operator}, memory")
        memory = [peak("ppma.bench.scaling:call", operator, side, warm=False) for side in measured]
        report.rows.append(
            [
                operator,
                theory,
                costs.exponent(sides, seconds),
                costs.exponent(sides, memory),
                ", ".join(map(str, sides)),
                ", ".join(f"{1e3 * s:.1f}" for s in seconds),
                ", ".join(f"{m / 1e6:.1f}" for m in memory),
            ]
        )
    report.notes.append("Multiplications of one product with the mask, counted:\n\n" + costs.table())
    yield report

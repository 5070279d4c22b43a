"""Resources of the GPU kernels, compiled ahead of time for each target; nothing runs."""

import torch

from ppma.bench.gpu import cases
from ppma.bench.report import Report, Value
from ppma.progress import Progress


def resource_report(
    targets: list[str], channels: int, dtype: str, operators: list[str] | None = None
) -> tuple[Report, bool]:
    """What the compiler makes of every kernel, and whether any spills.

    Args:
        targets: names of `targets.TARGETS`.
        channels: of a head.
        dtype: of the values, its name in torch.
        operators: those of `cases.CASES` to compile; None for all.
    """
    report = Report(
        f"Kernels for heads of {channels} channels, {dtype}: registers of a thread, spilled bytes if any, occupancy, "
        "instructions a score (special functions)",
        ["operator", "kernel", *targets],
        notes=["Compiled ahead of time, nothing was run. Instructions are those of the inner loop, padding included."],
    )
    spilled = False
    with Progress("compiling the kernels"):
        compiled = list(cases.rows(targets, channels, getattr(torch, dtype), operators))
    for row in compiled:
        cells: list[Value] = []
        for target in targets:
            taken, cost = row.resources[target], row.costs[target]
            spilled |= taken.spilled > 0
            text = f"{taken.registers}, {taken.spilled} spilled" if taken.spilled else f"{taken.registers}"
            text += f", {taken.occupancy(target):.0%}"
            cells.append(text if cost is None else f"{text}, {cost.instructions:.1f} ({cost.special:.2f})")
        report.rows.append([row.operator, row.kernel, *cells])
    return report, spilled

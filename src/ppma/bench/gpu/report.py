"""Resources of the GPU kernels, compiled ahead of time for each target; nothing runs."""

import torch

from ppma.bench.gpu import cases
from ppma.bench.report import Report, Value
from ppma.progress import Progress


def resource_report(targets: list[str], channels: int, dtype: str) -> tuple[Report, bool]:
    """Registers, shared memory and spills of every kernel, and whether any spills; `dtype` is its name in torch."""
    report = Report(
        f"Kernels for heads of {channels} channels, {dtype}: "
        "registers of a thread / shared memory / spilled bytes of a thread",
        ["operator", "kernel", *targets, "bytes/token", "FLOP/token"],
        notes=["Compiled ahead of time, nothing was run. Bytes and FLOPs are for a token of a head."],
    )
    spilled = False
    with Progress("compiling the kernels"):
        compiled = list(cases.rows(targets, channels, getattr(torch, dtype)))
    for row in compiled:
        taken: list[Value] = []
        for target in targets:
            found = row.resources[target]
            spilled |= found.spilled > 0
            taken.append(f"{found.registers} / {found.shared / 1024:.1f} KB / {found.spilled}")
        work = row.work
        report.rows.append(
            [row.operator, row.kernel, *taken, round(work.bytes / row.tokens), round(work.matrix / row.tokens)]
        )
    return report, spilled

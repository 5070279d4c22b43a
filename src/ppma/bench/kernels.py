"""`ppma kernels`: what the GPU kernels should cost, and with `--report` what they take on GPUs not at hand."""

import argparse
import sys

import torch

from ppma.bench.report import Report, Value

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_MOST_CHANNELS = 256  # heads in use have 16 to 128
ALL_TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--report", action="store_true", help="compile every kernel; registers, shared memory, spills")
    parser.add_argument(
        "--targets", nargs="+", choices=ALL_TARGETS, default=list(ALL_TARGETS), help="--report: for these"
    )
    parser.add_argument("--channels", type=int, default=32, help="--report: of a head (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float16", help="--report: of the values")


def run(args: argparse.Namespace) -> int:
    """Print the tables; 1 if a kernel spills registers."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ValueError(f"kernels: expected Triton to be installed, got {error}") from error
    if not 1 <= args.channels <= _MOST_CHANNELS:
        raise ValueError(f"--channels: expected 1 to {_MOST_CHANNELS}, got {args.channels}")
    if not args.report:
        from ppma.bench import roofline

        for report in roofline.reports():
            print(report.markdown(), end="\n\n")
        return 0
    report, spilled = resource_report(list(args.targets), args.channels, DTYPES[args.dtype])
    print(report.markdown())
    return int(spilled)


def resource_report(targets: list[str], channels: int, dtype: torch.dtype) -> tuple[Report, bool]:
    """Registers, shared memory and spills of every kernel, and whether any spills."""
    from ppma.ops.backends.triton import report as kernels

    report = Report(
        f"Kernels for heads of {channels} channels, {str(dtype).removeprefix('torch.')}: "
        "registers of a thread / shared memory / spilled bytes of a thread",
        ["operator", "kernel", *targets, "bytes/token", "FLOP/token"],
        notes=["Compiled ahead of time, nothing was run. Bytes and FLOPs are for a token of a head."],
    )
    spilled = False
    for row in kernels.rows(targets, channels, dtype):
        print(f"\r{row.operator}: {row.kernel}".ljust(78)[:78], end="", file=sys.stderr, flush=True)
        taken: list[Value] = []
        for target in targets:
            found = row.resources[target]
            spilled |= found.spilled > 0
            taken.append(f"{found.registers} / {found.shared / 1024:.1f} KB / {found.spilled}")
        work = row.work
        report.rows.append(
            [row.operator, row.kernel, *taken, round(work.bytes / row.tokens), round(work.matrix / row.tokens)]
        )
    print("\r".ljust(79) + "\r", end="", file=sys.stderr, flush=True)
    return report, spilled

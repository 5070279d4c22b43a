"""`ppma kernels`: predicted cost of the GPU kernels; what the compiler makes of them; host time of their launches."""

import argparse

from ppma_cli import choices

HELP = "the GPU kernels: predicted cost; registers, occupancy, instructions a score (--report); host time (--host)"

_MOST_CHANNELS = 256  # heads usually have 16 to 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--report", action="store_true", help="compile every kernel; registers, spills, occupancy, instructions a score"
    )
    parser.add_argument("--host", action="store_true", help="measure the host time of operator calls, without a GPU")
    parser.add_argument(
        "--targets",
        nargs="+",
        choices=choices.TARGETS,
        default=list(choices.TARGETS),
        help="--report: GPU architectures (default: all)",
    )
    parser.add_argument(
        "--operators",
        nargs="+",
        choices=choices.OPERATORS,
        default=list(choices.OPERATORS),
        help="--report: operators whose kernels are compiled (default: all)",
    )
    parser.add_argument("--channels", type=int, default=32, help="--report: channels per head (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=choices.DTYPES,
        default="float16",
        help="--report: dtype of q, k and v (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the tables; 1 if a kernel spills registers."""
    if not 1 <= arguments.channels <= _MOST_CHANNELS:
        raise ValueError(f"--channels: expected 1 to {_MOST_CHANNELS}, got {arguments.channels}")
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ValueError(f"kernels: expected Triton to be installed, got {error}") from error
    from ppma.bench.gpu import prediction
    from ppma.bench.gpu import report as resources
    from ppma.progress import Progress

    if arguments.host:
        from ppma.bench.gpu.host import host_report

        with Progress("compiling and measuring"):
            report = host_report()
        print(report.markdown())
        return 0
    if not arguments.report:
        with Progress("predicting"):
            reports = prediction.reports()
        for report in reports:
            print(report.markdown(), end="\n\n")
        return 0
    report, spilled = resources.resource_report(
        arguments.targets, arguments.channels, arguments.dtype, arguments.operators
    )
    print(report.markdown())
    return int(spilled)

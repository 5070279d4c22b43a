"""`ppma doctor`: check that everything works on this GPU."""

import argparse
import os
import sys
from pathlib import Path

HELP = "check the kernels on a GPU and write one report file (--gpu)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", action="store_true", required=True, help="check the GPU kernels")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N (default: %(default)s)")
    parser.add_argument(
        "--dry-run", action="store_true", help="run what the CPU and Triton's interpreter can run, on small grids"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("ppma-doctor.md"), help="report file (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each check and write the report; 1 if a check failed."""
    if arguments.dry_run and os.environ.get("TRITON_INTERPRET") != "1":  # read when Triton is imported: start again
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "TRITON_INTERPRET": "1"})
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ValueError(f"doctor: expected Triton to be installed, got {error}") from error
    from ppma.bench.gpu.doctor import examine
    from ppma.outputs import check_target

    check_target("--output", arguments.output)
    text, well = examine(arguments.device, arguments.dry_run, tell=print)
    arguments.output.write_text(text)
    print(f"report written to {arguments.output}")
    return 0 if well else 1

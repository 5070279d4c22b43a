"""`ppma doctor`: check the installation, or the kernels on a GPU."""

import argparse
import os
import sys
from pathlib import Path

HELP = "check the installation, or with --gpu the kernels on a GPU"
_OF_GPU = {"device": "cuda", "dry_run": False, "output": Path("ppma-doctor.md")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", action="store_true", help="check the GPU kernels and write one report file")
    gpu = parser.add_argument_group("with --gpu")
    gpu.add_argument("--device", help="cuda or cuda:N (default: cuda)")
    gpu.add_argument(
        "--dry-run",
        action="store_true",
        default=None,
        help="run what the CPU and Triton's interpreter can run, on small grids",
    )
    gpu.add_argument("--output", type=Path, help="report file (default: ppma-doctor.md)")


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each check; 1 if a check failed."""
    given = {name: getattr(arguments, name) for name in _OF_GPU if getattr(arguments, name) is not None}
    if arguments.gpu:
        return _run_gpu(**{**_OF_GPU, **given})
    if given:
        raise ValueError(f"expected --gpu with --{next(iter(given)).replace('_', '-')}, got no --gpu")
    from ppma.bench.doctor import examine

    return 0 if examine() else 1


def _run_gpu(device: str, dry_run: bool, output: Path) -> int:
    if dry_run and os.environ.get("TRITON_INTERPRET") != "1":  # read when Triton is imported: start again
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "TRITON_INTERPRET": "1"})
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ValueError(f"doctor: expected Triton to be installed, got {error}") from error
    from ppma.bench.gpu.doctor import examine
    from ppma.outputs import check_target

    check_target("--output", output)
    text, well = examine(device, dry_run, tell=print)
    output.write_text(text)
    print(f"report written to {output}")
    return 0 if well else 1

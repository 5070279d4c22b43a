"""`ppma bench`: which suite, how long, and where the numbers go."""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppma.bench.report import Report

HELP = "measure, and compare with another implementation"

SUITES = ("ops", "models", "scaling", "floor", "against")
_LARGEST_BATCH, _LARGEST_SIZE, _MOST_ROUNDS = 1 << 16, 1 << 14, 1 << 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("suite", nargs="?", choices=SUITES)
    parser.add_argument("other", nargs="?", help="against: FILE.py:callable, another implementation")
    parser.add_argument("--device", default="cpu", help="cuda: the GPU kernels beside PyTorch, without a suite")
    parser.add_argument("--model", default="ppma_tiny", help="models, floor, against (default: %(default)s)")
    parser.add_argument("--operator", help="against: compare this operator instead of a model")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default: the suite's own)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here as well")


def run(args: argparse.Namespace) -> int:
    """Measure, print tables, write JSON."""
    if args.suite is None and args.device == "cpu":
        raise ValueError(f"suite: expected one of {', '.join(SUITES)}, or --device cuda; got nothing")
    if args.suite is not None and args.device != "cpu":
        raise ValueError(f"suite: expected none with --device {args.device}, got {args.suite!r}")
    if args.suite == "against" and args.other is None:
        raise ValueError("against: expected FILE.py:callable after `ppma bench against`, got nothing")
    _check_numbers(args)
    from ppma.bench.report import environment

    _check_names(args)
    _settle_malloc()
    reports = _reports(args)
    where = environment()
    for report in reports:
        print(report.markdown(), end="\n\n")
    print("Measured on: " + ", ".join(f"{name} {value}" for name, value in where.items()))
    if args.json:
        document = {"environment": where, "reports": [report.as_dict() for report in reports]}
        args.json.write_text(json.dumps(document, indent=2) + "\n")
        print(f"Written to {args.json}")
    return 0


def _check_numbers(args: argparse.Namespace) -> None:
    if args.device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", args.device):
        raise ValueError(f"--device: expected cpu, cuda or cuda:N, got {args.device!r}")
    limits = {"batch": _LARGEST_BATCH, "size": _LARGEST_SIZE, "rounds": _MOST_ROUNDS}
    for option, most in limits.items():
        value = getattr(args, option)
        if value is not None and not 1 <= value <= most:
            raise ValueError(f"--{option}: expected 1 to {most}, got {value}")


def _check_names(args: argparse.Namespace) -> None:
    from ppma.bench.against import OPERATORS
    from ppma.models import CONFIGS
    from ppma.ops import checks
    from ppma.outputs import check_target

    if args.suite in ("models", "floor", "against"):
        checks.one_of("--model", args.model, CONFIGS)
    if args.suite == "models" and not args.model.startswith("ppma_"):
        raise ValueError(f"--model: expected a PPMA model, beside which RMT stands anyway, got {args.model!r}")
    if args.operator is not None:
        checks.one_of("--operator", args.operator, OPERATORS)
    if args.json is not None:
        check_target("--json", args.json)


def _reports(args: argparse.Namespace) -> "list[Report]":
    from ppma.bench import against, floor, models, ops, scaling

    rounds = {} if args.rounds is None else {"rounds": args.rounds}
    sizes = {"batch": args.batch, "size": args.size}
    if args.device != "cpu":
        from ppma.bench.gpu import measure  # which needs Triton

        return measure.run(args.device, **rounds)
    if args.suite == "ops":
        return ops.suite(**rounds)
    if args.suite == "scaling":
        return scaling.suite(**rounds)
    if args.suite == "floor":
        return floor.suite(args.model, **sizes, **rounds)
    if args.suite == "models":
        return models.suite(args.model, **sizes, **rounds)
    other = against.load(args.other)
    if args.operator:
        return [against.compare_operator(other, args.operator, rounds=args.rounds or 9)]
    return [against.compare_models(other, args.model, rounds=args.rounds or 9, **sizes)]


def _settle_malloc() -> None:
    """Start this command again with fixed malloc thresholds, which glibc reads only when a process starts."""
    from ppma.bench.report import MALLOC

    if sys.platform == "linux" and not all(name in os.environ for name in MALLOC):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**MALLOC, **os.environ})

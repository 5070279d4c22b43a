"""`ppma bench`: run a benchmark suite, print tables and write JSON."""

import argparse
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppma.bench.report import Report

HELP = "benchmark operators and models, or compare with another implementation"

SUITES = ("ops", "models", "scaling", "floor", "against")
_LARGEST_BATCH, _LARGEST_SIZE, _MOST_ROUNDS = 1 << 16, 1 << 14, 1 << 16
_MODEL, _BATCH, _ROUNDS_AGAINST = "ppma_tiny", 8, 9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("suite", nargs="?", choices=SUITES, help="what to benchmark")
    parser.add_argument("other", nargs="?", help="against: another implementation, FILE.py:callable")
    parser.add_argument("--device", default="cpu", help="cuda: the GPU kernels and PyTorch, without a suite")
    parser.add_argument(
        "--model",
        nargs="+",
        metavar="NAME",
        help=f"models: any timm models, compared with the first; floor, against: one of ours (default: {_MODEL})",
    )
    parser.add_argument(
        "--paper", action="store_true", help="models: the paper's throughput table, with the paper's figures"
    )
    parser.add_argument("--operator", help="against: compare this operator instead of a model")
    parser.add_argument("--batch", type=int, help=f"images per step (default: {_BATCH}; --paper: 64)")
    parser.add_argument("--size", type=int, default=224, help="height and width of the images (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default: depends on the suite)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here, after each round")


def run(args: argparse.Namespace) -> int:
    """Run a suite; print each table when it is complete, and what is measured if interrupted."""
    if args.suite is None and args.device == "cpu":
        raise ValueError(f"suite: expected one of {', '.join(SUITES)}, or --device cuda; got nothing")
    if args.suite is not None and args.device != "cpu":
        raise ValueError(f"suite: expected none with --device {args.device}, got {args.suite!r}")
    if args.suite == "against" and args.other is None:
        raise ValueError("against: expected FILE.py:callable after `ppma bench against`, got nothing")
    if args.paper and (args.suite != "models" or args.model):
        raise ValueError("--paper: expected with `ppma bench models` and without --model")
    _check_numbers(args)
    from ppma.allocator import reuse_freed_memory
    from ppma.bench.report import environment

    _check_names(args)
    reuse_freed_memory()
    where = environment()
    results: dict[str, Report] = {}

    def publish(report: "Report") -> None:
        results[report.title] = report
        if args.json:
            _write(args.json, where, results.values(), complete=False)

    try:
        for report in _reports(args, publish):
            publish(report)
            print(report.markdown(), end="\n\n", flush=True)
    except KeyboardInterrupt:
        if results and (last := list(results.values())[-1]).partial:
            print(last.markdown())
        raise
    print("Measured on: " + ", ".join(f"{name} {value}" for name, value in where.items()))
    if args.json:
        _write(args.json, where, results.values(), complete=True)
        print(f"wrote {args.json}")
    return 0


def _write(path: Path, where: dict[str, Any], reports: Iterable["Report"], complete: bool) -> None:
    from ppma.atomic import write_atomically

    document = {"environment": where, "complete": complete, "reports": [report.as_dict() for report in reports]}
    write_atomically(path, (json.dumps(document, indent=2) + "\n").encode())


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

    names = args.model or [_MODEL]
    if args.suite == "models":
        for name in names:
            _check_timm_name(name)
    elif args.suite in ("floor", "against"):
        if len(names) > 1:
            raise ValueError(f"--model: expected one model, got {' '.join(names)}")
        checks.one_of("--model", names[0], CONFIGS)
    if args.operator is not None:
        checks.one_of("--operator", args.operator, OPERATORS)
    if args.json is not None:
        check_target("--json", args.json)


def _check_timm_name(name: str) -> None:
    import difflib

    import timm

    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"--model: expected a timm model, got {name!r}{hint}")


def _reports(args: argparse.Namespace, publish: "Callable[[Report], None]") -> "Iterable[Report]":
    from ppma.bench import against, floor, models, ops, scaling
    from ppma.models import CONFIGS

    rounds = {} if args.rounds is None else {"rounds": args.rounds}
    sizes = {"batch": args.batch or _BATCH, "size": args.size}
    names = args.model or [_MODEL]
    if args.device != "cpu":
        from ppma.bench.gpu import measure  # needs Triton

        return measure.run(args.device, **rounds)
    if args.suite == "ops":
        return ops.suite(**rounds)
    if args.suite == "scaling":
        return scaling.suite(**rounds)
    if args.suite == "floor":
        return floor.suite(names[0], **sizes, **rounds)
    if args.paper:
        return models.paper_table(batch=args.batch or models.PAPER_BATCH, size=args.size, publish=publish, **rounds)
    if args.suite == "models":
        if len(names) == 1 and names[0] in CONFIGS and names[0].startswith("ppma_"):
            return models.suite(names[0], publish=publish, **sizes, **rounds)
        return models.baselines(names, publish=publish, **sizes, **rounds)
    other = against.load(args.other)
    rounds = {"rounds": args.rounds or _ROUNDS_AGAINST}
    if args.operator:
        return [against.compare_operator(other, args.operator, **rounds)]
    return [against.compare_models(other, names[0], **rounds, **sizes)]

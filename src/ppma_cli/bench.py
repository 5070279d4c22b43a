"""`ppma bench`: run a benchmark suite, print tables and write JSON."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppma.bench.report import Report

HELP = "benchmark operators and models, or compare with another implementation"

SUITES = ("ops", "models", "scaling", "floor", "against", "targets", "render")
_LARGEST_BATCH, _LARGEST_SIZE, _MOST_ROUNDS = 1 << 16, 1 << 14, 1 << 16
_MODEL, _BATCH, _ROUNDS_AGAINST = "ppma_tiny", 8, 9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("suite", nargs="?", choices=SUITES, help="what to benchmark")
    parser.add_argument(
        "other",
        nargs="*",
        help="against: another implementation, FILE.py:callable; render: result files of `ppma bench targets`",
    )
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
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write the results here, after each round; targets: rows that the file holds are not measured again",
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="targets: rows whose name contains this")
    parser.add_argument("--quick", action="store_true", help="targets: only PPMA-T and ppma_nano at 32 pixels")
    parser.add_argument("--isa", choices=("avx2",), help="targets: emulate a CPU that has no more than this")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="render: replace the tables of this Markdown page")


def run(args: argparse.Namespace) -> int:
    """Run a suite; print each table when it is complete, and what is measured if interrupted."""
    if args.suite is None and args.device == "cpu":
        raise ValueError(f"suite: expected one of {', '.join(SUITES)}, or --device cuda; got nothing")
    if args.suite is not None and args.device != "cpu":
        raise ValueError(f"suite: expected none with --device {args.device}, got {args.suite!r}")
    if args.suite == "against" and len(args.other) != 1:
        raise ValueError(f"against: expected FILE.py:callable after `ppma bench against`, {_given(args.other)}")
    if args.suite not in ("against", "render") and args.other:
        raise ValueError(f"suite: expected nothing after {args.suite!r}, {_given(args.other)}")
    if args.suite != "targets" and (args.only or args.quick or args.isa):
        raise ValueError("--only, --quick, --isa: expected with `ppma bench targets`")
    if args.paper and (args.suite != "models" or args.model):
        raise ValueError("--paper: expected with `ppma bench models` and without --model")
    _check_numbers(args)
    if args.suite == "render":
        return _render(args)
    if args.isa:
        _emulate_avx2()
    from ppma.allocator import reuse_freed_memory
    from ppma.bench.report import environment

    _check_names(args)
    reuse_freed_memory()
    where = environment()
    if args.suite == "targets":
        return _targets(args, where)
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


def _given(words: list[str]) -> str:
    return f"got {' '.join(words)}" if words else "got nothing"


def _targets(args: argparse.Namespace, where: dict[str, Any]) -> int:
    """Measure the rows of the performance page, printing each and keeping it in the result file."""
    from ppma.atomic import write_atomically
    from ppma.bench import render, targets

    names = targets.selected(args.only, args.quick)
    done: dict[str, targets.Result] = {}
    if args.json and args.json.exists():
        document = render.load(args.json)
        if document["environment"] != where:
            raise ValueError(f"--json: expected a new file or results of this machine and version, got {args.json}")
        done = document["rows"]
        print(f"{args.json} holds {len(set(names) & set(done))} of {len(names)} rows", flush=True)
    left = len(set(names) - set(done))
    for number, (name, result) in enumerate(targets.measure(names, dict(done)), start=1):
        done[name] = result
        print(f"[{number}/{left}] {targets.summary(name, result)}", flush=True)
        if args.json:
            complete = set(targets.rows()) <= set(done)
            document = {"environment": where, "complete": complete, "rows": done}
            write_atomically(args.json, (json.dumps(document, indent=2) + "\n").encode())
    print("\n" + render.tables([{"environment": where, "rows": done}]))
    return 0


def _render(args: argparse.Namespace) -> int:
    """Print the tables of the performance page, or write them into it."""
    from ppma.bench import render

    if not args.other:
        raise ValueError("render: expected result files of `ppma bench targets`, got nothing")
    text = render.tables([render.load(Path(path)) for path in args.other])
    if args.into is None:
        print(text)
    else:
        render.insert(args.into, text)
        print(f"wrote {args.into}")
    return 0


def _emulate_avx2() -> None:
    """Restart with the variables that PyTorch and its libraries read when they are loaded."""
    from ppma.bench.report import EMULATE_AVX2

    if sys.platform == "linux" and any(os.environ.get(name) != value for name, value in EMULATE_AVX2.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **EMULATE_AVX2})


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
    other = against.load(args.other[0])
    rounds = {"rounds": args.rounds or _ROUNDS_AGAINST}
    if args.operator:
        return [against.compare_operator(other, args.operator, **rounds)]
    return [against.compare_models(other, names[0], **rounds, **sizes)]

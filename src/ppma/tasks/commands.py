"""The commands around training, for the command line: each adds its arguments to a parser and runs them."""

import argparse
import dataclasses
import json
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ppma.config import override
from ppma.engine.errors import StoppedError
from ppma.engine.logging import format_metrics
from ppma.masks import KINDS
from ppma.models import open_checkpoint
from ppma.tasks import registry, run
from ppma.tasks.classification import ablation, demo


def _set_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE ...",
        dest="assignments",
        help="change keys of the configuration, for example --set lr=1e-4 data.root=/data; may be repeated",
    )


def train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, for example configs/digits_nano.yaml")
    parser.add_argument("--out", help="folder of the run (default: runs/ and the name of the file)")
    parser.add_argument(
        "--resume", default="none", metavar="auto|PATH", help="continue the run in --out, or from a checkpoint"
    )
    parser.add_argument("--overwrite", action="store_true", help="delete an earlier run in --out")
    _set_option(parser)


def train(arguments: argparse.Namespace) -> int:
    """Train; the same command under torchrun trains on several processes."""
    _one_line_warnings()
    out = Path(arguments.out or Path("runs") / Path(arguments.config).stem)
    try:
        summary = run.train(
            arguments.config,
            out,
            resume=arguments.resume,
            overwrite=arguments.overwrite,
            assignments=arguments.assignments,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; --resume auto continues from the newest checkpoint in {out}") from None
    measured = {name: value for name, value in summary.items() if name.startswith(("val_", "test_"))}
    _tell(f"{out}: {summary['steps']} steps in {summary['seconds']:.0f} s; {format_metrics(measured)}")
    return 0


def eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="best.safetensors of a run, or any weight file that ppma reads")
    parser.add_argument("--data", required=True, help="a configuration file, a folder, or digits")
    parser.add_argument("--split", help="which part of the data (default: the held-out one)")
    parser.add_argument("--batch-size", type=int, help="of one process (default: 64; detection, segmentation: 4)")
    parser.add_argument("--workers", type=int, default=0, help="loader processes")
    parser.add_argument("--amp", choices=("none", "bf16", "fp16"), default="none")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _set_option(parser)


def evaluate(arguments: argparse.Namespace) -> int:
    """Measure a checkpoint on held-out data."""
    _one_line_warnings()
    checkpoint = open_checkpoint(arguments.checkpoint)
    measured = registry.task_class(checkpoint.task, str(checkpoint.path)).evaluate(
        checkpoint,
        arguments.data,
        split=arguments.split,
        assignments=arguments.assignments,
        workers=arguments.workers,
        amp=arguments.amp,
        batch_size=arguments.batch_size,
    )
    _tell(json.dumps(measured, indent=2) if arguments.json else format_metrics(measured))
    return 0


def predict_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="best.safetensors of a run, or any weight file that ppma reads")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="a file, or a folder for the images in it")
    parser.add_argument("--top", type=int, help="how many classes to show (classification; default: 5)")
    parser.add_argument("--out", help="what is drawn: a file, or a folder for several images (detection, segmentation)")
    parser.add_argument("--threshold", type=float, help="least score of an instance (detection; default: 0.5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _set_option(parser)


def predict(arguments: argparse.Namespace) -> int:
    """Show the likeliest classes of images, or what is in them and where.

    An image that cannot be read is a line on stderr; the others follow, and the exit code is 2 at the end.
    """
    _one_line_warnings()
    problems: list[str] = []

    def report(problem: str) -> None:
        problems.append(problem)
        print(f"ppma predict: {problem}", file=sys.stderr)

    checkpoint = open_checkpoint(arguments.checkpoint)
    task = registry.task_class(checkpoint.task, str(checkpoint.path))
    given = {name: getattr(arguments, name) for name in ("top", "out", "threshold")}
    given = {name: value for name, value in given.items() if value is not None}
    known = {field.name for field in dataclasses.fields(task.predict_options)}
    if foreign := sorted(given.keys() - known):
        raise ValueError(f"--{foreign[0]}: expected nothing: {checkpoint.task} has no such option")
    options = task.parse_options(override(given, arguments.assignments))
    predictions = task.predict(checkpoint, arguments.images, options, report)
    if arguments.json:
        _print_json(one.values for one in predictions)
    else:
        for one in predictions:
            print("\n".join(one.lines), flush=True)
    return 2 if problems else 0


def _print_json(items: Iterator[dict[str, Any]]) -> None:
    """A list, printed item by item as they come and closed whatever happens."""
    begun = False
    try:
        for item in items:
            text = json.dumps([item], indent=2).removesuffix("\n]")
            print("," + text[1:] if begun else text, end="", flush=True)
            begun = True
    finally:
        print("\n]" if begun else "[]")


def ablate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, for example configs/digits_ablation.yaml")
    parser.add_argument("--masks", default=",".join(KINDS), help="comma-separated (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="runs for each mask")
    parser.add_argument("--out", help="folder of the runs and the table (default: runs/ and the name of the file)")
    _set_option(parser)


def ablate(arguments: argparse.Namespace) -> int:
    """Train with each mask and several seeds, and print one table; finished runs are not repeated."""
    _one_line_warnings()
    config = registry.load_config(arguments.config, arguments.assignments)
    out = Path(arguments.out or Path("runs") / Path(arguments.config).stem)
    study = ablation.Ablation(config, arguments.masks.split(","), arguments.seeds, out)
    try:
        study.run()
    except StoppedError as stopped:
        raise StoppedError("stopped; the same command goes on from here", stopped.signal) from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command goes on from the newest checkpoint") from None
    finally:  # a run that fails does not take the finished ones with it
        if study.results():
            print(study.table())
            print(f"\nwritten: {out / 'ablation.md'}, {out / 'ablation.json'}")
    return 0


def demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="runs/demo", help="folder that is written anew")
    _set_option(parser)


def run_demo(arguments: argparse.Namespace) -> int:
    """Train a small model on handwritten digits, evaluate it and look inside."""
    _one_line_warnings()
    print(demo.run(Path(arguments.out), arguments.assignments))
    return 0


def _tell(text: str) -> None:
    """Print, in one process of several."""
    if os.environ.get("RANK", "0") == "0":
        print(text)


def _one_line_warnings() -> None:
    """Warnings, and errors of threads in the background, as a line for the user, not as lines of code."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show
    threading.excepthook = lambda failed: show(f"{failed.exc_type.__name__}: {failed.exc_value}")

"""`ppma predict`: classify images, or detect and segment what they show."""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ppma_cli.output import show_warnings_in_one_line

if TYPE_CHECKING:
    from ppma.progress import Progress
    from ppma.tasks.base import Prediction

HELP = "classify images, or detect and segment what they show"

_OPTIONS = ("out", "overwrite", "device", "batch_size", "top", "threshold", "annotations")  # None if not given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a weight file, such as best.safetensors of a run, or a published name")
    parser.add_argument(
        "images", nargs="+", metavar="PATH", help="an image, a folder of images, or a pattern ('**/*.jpg')"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="folder for result files: predictions.csv (classification), label maps and overlays (segmentation), "
        "predictions.json in COCO's results format and overlays (detection)",
    )
    parser.add_argument("--overwrite", action="store_true", default=None, help="replace result files in DIR")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: the GPU if there is one)")
    parser.add_argument("--batch-size", type=int, help="images at once (classification; default: 16)")
    parser.add_argument("--top", type=int, help="number of classes to show (classification; default: 5)")
    parser.add_argument("--threshold", type=float, help="minimum score of an instance (detection; default: 0.5)")
    parser.add_argument(
        "--annotations",
        metavar="FILE",
        help="COCO annotations with the ids for predictions.json (detection; default: numbers from 1)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="options", help="a task-specific option"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print predictions for each image.

    An image that cannot be read is reported on stderr and skipped; the exit code is then 2.
    """
    from ppma.config import override
    from ppma.data.decoding import image_files
    from ppma.models import open_checkpoint
    from ppma.progress import Progress
    from ppma.tasks.registry import task_class

    show_warnings_in_one_line()
    checkpoint = open_checkpoint(arguments.checkpoint)
    task = task_class(checkpoint.task, str(checkpoint.path))
    given = {name: getattr(arguments, name) for name in _OPTIONS if getattr(arguments, name) is not None}
    known = {field.name for field in dataclasses.fields(task.predict_options)}
    if foreign := sorted(given.keys() - known):
        raise ValueError(f"--{foreign[0].replace('_', '-')}: not an option of {checkpoint.task}")
    options = task.parse_options(override(given, arguments.options))
    paths, problems = image_files(arguments.images)
    failures: list[str] = []
    with Progress("predict", len(paths)) as progress:

        def report(problem: str) -> None:
            failures.append(problem)
            progress.clear()
            print(f"ppma predict: {problem}", file=sys.stderr)

        for problem in problems:
            report(problem)
        with contextlib.closing(task.predict(checkpoint, paths, options, report)) as predictions:
            counted = _count(predictions, progress)
            if arguments.json:
                _print_json(one.values for one in counted)
            else:
                for one in counted:
                    print("\n".join(one.lines), flush=True)
    if failures:
        print(f"ppma predict: {len(failures)} failed, {progress.done} predicted", file=sys.stderr)
    if options.out is not None and not arguments.json:
        print(f"{progress.done} predicted, results in {options.out}")
    return 2 if failures else 0


def _count(predictions: "Iterator[Prediction]", progress: "Progress") -> "Iterator[Prediction]":
    """Yield the predictions with the progress line out of the way, and count them."""
    for one in predictions:
        progress.clear()
        yield one
        progress.advance()


def _print_json(items: Iterator[dict[str, Any]]) -> None:
    """Print a JSON list item by item; it is closed even if an error ends the iteration."""
    begun = False
    try:
        for item in items:
            text = json.dumps([item], indent=2).removesuffix("\n]")
            print("," + text[1:] if begun else text, end="", flush=True)
            begun = True
    finally:
        print("\n]" if begun else "[]")

"""`ppma predict`: classify images, or detect and segment what they show."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any

from ppma_cli.output import show_warnings_in_one_line

HELP = "classify images, or detect and segment what they show"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a weight file, such as best.safetensors of a run, or a published name")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="an image file or a folder of images")
    parser.add_argument("--top", type=int, help="number of classes to print (classification; default: 5)")
    parser.add_argument(
        "--out", help="file for the drawn result, or a folder for several images (detection, segmentation)"
    )
    parser.add_argument("--threshold", type=float, help="minimum score of an instance (detection; default: 0.5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="options", help="a task-specific option"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print predictions for each image.

    An image that cannot be read is reported on stderr and skipped; the exit code is then 2.
    """
    from ppma.config import override
    from ppma.models import open_checkpoint
    from ppma.tasks.registry import task_class

    show_warnings_in_one_line()
    problems: list[str] = []

    def report(problem: str) -> None:
        problems.append(problem)
        print(f"ppma predict: {problem}", file=sys.stderr)

    checkpoint = open_checkpoint(arguments.checkpoint)
    task = task_class(checkpoint.task, str(checkpoint.path))
    given = {name: getattr(arguments, name) for name in ("top", "out", "threshold")}
    given = {name: value for name, value in given.items() if value is not None}
    known = {field.name for field in dataclasses.fields(task.predict_options)}
    if foreign := sorted(given.keys() - known):
        raise ValueError(f"--{foreign[0]}: not an option of {checkpoint.task}")
    options = task.parse_options(override(given, arguments.options))
    predictions = task.predict(checkpoint, arguments.images, options, report)
    if arguments.json:
        _print_json(one.values for one in predictions)
    else:
        for one in predictions:
            print("\n".join(one.lines), flush=True)
    return 2 if problems else 0


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

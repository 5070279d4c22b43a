"""`ppma predict`: the classes of images, or what is in them and where."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any

from ppma_cli.output import show_warnings_in_one_line

HELP = "classify images, or draw what is in them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="best.safetensors of a run, or any weight file that ppma reads")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="a file, or a folder for the images in it")
    parser.add_argument("--top", type=int, help="how many classes to show (classification; default: 5)")
    parser.add_argument("--out", help="what is drawn: a file, or a folder for several images (detection, segmentation)")
    parser.add_argument("--threshold", type=float, help="least score of an instance (detection; default: 0.5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="options", help="an option of the file's task"
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the likeliest classes of images, or what is in them and where.

    An image that cannot be read is a line on stderr; the others follow, and the exit code is 2 at the end.
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
        raise ValueError(f"--{foreign[0]}: expected nothing: {checkpoint.task} has no such option")
    options = task.parse_options(override(given, arguments.options))
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

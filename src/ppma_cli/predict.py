"""`ppma predict`: the classes of images, or what is in them and where."""

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ppma_cli.output import show_warnings_in_one_line

if TYPE_CHECKING:
    from ppma.tasks.classification.inference import Prediction

HELP = "classify images, or draw what is in them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="best.safetensors of a run, or any weight file that ppma reads")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="a file, or a folder for the images in it")
    parser.add_argument("--top", type=int, default=5, help="how many classes to show (classification)")
    parser.add_argument("--out", help="what is drawn: a file, or a folder for several images (detection, segmentation)")
    parser.add_argument("--threshold", type=float, default=0.5, help="least score of an instance (detection)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Show the likeliest classes of images, or what is in them and where.

    An image that cannot be read is a line on stderr; the others follow, and the exit code is 2 at the end.
    """
    from ppma.tasks import registry
    from ppma.tasks.classification import inference

    show_warnings_in_one_line()
    problems: list[str] = []

    def report(problem: str) -> None:
        problems.append(problem)
        print(f"ppma predict: {problem}", file=sys.stderr)

    task = registry.task_of(arguments.checkpoint)
    described: Iterator[tuple[dict[str, Any], list[str]]]
    if task == "classification":
        predictions = inference.predict(arguments.checkpoint, arguments.images, top=arguments.top, report=report)
        described = ((dataclasses.asdict(one), _class_lines(one)) for one in predictions)
    else:
        described = _predict_dense(task, arguments, report)
    if arguments.json:
        _print_json(values for values, _ in described)
    else:
        for _, lines in described:
            print("\n".join(lines), flush=True)
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


def _class_lines(prediction: "Prediction") -> list[str]:
    pairs = zip(prediction.classes, prediction.probabilities, strict=True)
    return [prediction.image, *(f"  {probability:7.2%}  {name}" for name, probability in pairs)]


def _predict_dense(
    task: str, arguments: argparse.Namespace, report: Callable[[str], None]
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    module = importlib.import_module(f"ppma.tasks.{task}.inference")
    options = {"threshold": arguments.threshold} if task == "detection" else {}
    for prediction in module.predict(
        arguments.checkpoint, arguments.images, out=arguments.out, report=report, **options
    ):
        first = f"{prediction['image']}, drawn in {prediction['overlay']}"
        yield prediction, [first, *(f"  {row}" for row in module.rows(prediction))]

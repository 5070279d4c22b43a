"""`ppma demo`: train, evaluate and visualise a small model."""

import argparse
from pathlib import Path

from ppma_cli.output import show_warnings_in_one_line
from ppma_cli.settings import add_settings

HELP = "train on the bundled digits, evaluate and visualise, and segment a photograph, in minutes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", default="runs/demo", help="output folder; an earlier run in it is overwritten (default: %(default)s)"
    )
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train a small model on handwritten digits, visualise its attention, and segment a photograph."""
    from ppma.tasks.classification import demo

    show_warnings_in_one_line()
    print(demo.run(Path(arguments.out), arguments.assignments))
    return 0

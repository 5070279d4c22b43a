"""`ppma demo`: from training to pictures of what was learned."""

import argparse
from pathlib import Path

from ppma_cli.output import show_warnings_in_one_line
from ppma_cli.settings import add_settings

HELP = "train on the embedded digits, measure and look inside, in minutes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="runs/demo", help="folder that is rewritten")
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train a small model on handwritten digits, evaluate it and look inside."""
    from ppma.tasks.classification import demo

    show_warnings_in_one_line()
    print(demo.run(Path(arguments.out), arguments.assignments))
    return 0

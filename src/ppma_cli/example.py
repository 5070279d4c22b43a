"""`ppma example`: the paper's example."""

import argparse

HELP = "the paper's 4 x 4 example, worked out"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The example takes none."""


def run(arguments: argparse.Namespace) -> int:
    """Print the worked example."""
    from ppma.explore.worked_example import worked_example

    print(worked_example())
    return 0

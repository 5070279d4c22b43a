"""`ppma example`: the paper's 4 x 4 example."""

import argparse

HELP = "print the paper's 4 x 4 example, worked out step by step"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Print the worked example."""
    from ppma.explore.worked_example import worked_example

    print(worked_example())
    return 0

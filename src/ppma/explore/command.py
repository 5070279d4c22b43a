"""`ppma example` and `ppma figure`."""

import argparse
from pathlib import Path

from ppma.explore.worked_example import worked_example

FIGURES = ("masks",)


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """The example takes none."""


def example(arguments: argparse.Namespace) -> int:
    """Print the worked example."""
    print(worked_example())
    return 0


def figure_arguments(parser: argparse.ArgumentParser) -> None:
    """The figure's name, and where to write it."""
    parser.add_argument("name", choices=FIGURES, help="masks: the structured masks side by side, for one query")
    parser.add_argument("--out", type=Path, required=True, help="a .png, .pdf or .svg file")


def figure(arguments: argparse.Namespace) -> int:
    """Draw and write a figure."""
    from ppma.explore.figures import mask_gallery

    mask_gallery().savefig(arguments.out, dpi=110)
    print(f"Written to {arguments.out}")
    return 0

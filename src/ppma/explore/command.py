"""`ppma example`, `ppma figure` and `ppma explore`."""

import argparse
from pathlib import Path

from ppma.explore.worked_example import worked_example


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """The example takes none."""


def example(arguments: argparse.Namespace) -> int:
    """Print the worked example."""
    print(worked_example())
    return 0


def model_options(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Which model: a checkpoint, or an architecture with random weights."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", type=Path, help="weights: of `ppma train`, `ppma demo` or the authors")
    which.add_argument(
        "--model", default=default, help="an architecture, with random weights: ppma_nano, ppma_tiny, ... (%(default)s)"
    )


def figure_arguments(parser: argparse.ArgumentParser) -> None:
    """The figure's name with its own options, and where to write it."""
    from ppma.explore.figures import add_figures

    add_figures(parser.add_subparsers(dest="name", metavar="NAME", required=True))


def figure(arguments: argparse.Namespace) -> int:
    """Draw and write a figure."""
    arguments.write(arguments)
    print(f"Written to {arguments.out}")
    return 0


def explore_arguments(parser: argparse.ArgumentParser) -> None:
    """What to look at, and where the page is served."""
    model_options(parser, default="ppma_tiny")
    parser.add_argument("--image", default="cat", help="a file, or a sample (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=7860, help="port to listen on (default: %(default)s)")


def explore(arguments: argparse.Namespace) -> int:
    """Serve the explorer until it is interrupted."""
    from ppma.explore.app import check_address, serve
    from ppma.explore.images import find_image
    from ppma.explore.subject import open_subject

    check_address(arguments.host, arguments.port)  # before a model is loaded
    subject = open_subject(arguments.checkpoint, arguments.model)
    serve(subject, find_image(arguments.image), host=arguments.host, port=arguments.port)
    return 0

"""`ppma figure`: the options of each figure. Indices are 1-based."""

import argparse
from pathlib import Path

from ppma_cli import choices
from ppma_cli.model_options import add_subject

HELP = "draw paths, masks, attention or costs to .png, .pdf, .svg or .gif"

Pair = tuple[int, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand per figure."""
    figures = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, (text, add_options) in FIGURES.items():
        figure = figures.add_parser(name, help=text, description=text)
        add_options(figure)
        formats = ".png, .pdf, .svg or .gif" if name == "attention" else ".png, .pdf or .svg"
        figure.add_argument("--out", type=Path, required=True, help=f"output file: {formats}")


def run(arguments: argparse.Namespace) -> int:
    """Draw a figure and write it."""
    from ppma.explore import figures

    figures.write(arguments)
    print(f"wrote {arguments.out}")
    return 0


def _pair(text: str) -> Pair:
    """Parse two integers, "3,4"."""
    try:
        first, second = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two whole numbers such as 3,4, got {text!r}") from None
    return first, second


def _query_option(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    described = "the centre" if default is None else default
    text = f"query token, 1-based (default: {described})"
    parser.add_argument("--query", type=_pair, metavar="ROW,COLUMN", default=default and _pair(default), help=text)


def _where_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stage", type=int, help="stage, 1-based (default: 1)")
    parser.add_argument("--block", type=int, help="block of the stage, 1-based (default: 1)")


def _head_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head", type=int, help="head, 1-based (default: the mean over the heads)")


def _add_paths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grid", type=_pair, default=(6, 8), metavar="ROWS,COLUMNS", help="grid size (default: 6,8)")
    _query_option(parser, "2,2")
    parser.add_argument(
        "--key", type=_pair, default=(5, 7), metavar="ROW,COLUMN", help="key token, 1-based (default: 5,7)"
    )


def _add_pairs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--side", type=int, default=3, help="grid side, at most 4 (default: %(default)s)")
    parser.add_argument("--path", choices=choices.PATHS, default="v2h", help="(default: %(default)s)")


def _add_masks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--side", type=int, help="grid side, without --checkpoint (default: 24)")
    parser.add_argument("--image", help="image file or sample whose edges set the decays (default: a disc)")
    parser.add_argument("--checkpoint", type=Path, help="use this model's decays for the image instead")
    _where_options(parser)
    _head_option(parser)
    _query_option(parser)


def _add_heads(parser: argparse.ArgumentParser) -> None:
    add_subject(parser, default="ppma_nano")
    parser.add_argument("--image", default="cat", help="image file or sample (default: %(default)s)")
    _where_options(parser)
    _query_option(parser)
    parser.add_argument("--mask", choices=choices.MASKS, help="replace the mask of this attention")
    parser.add_argument("--formulation", choices=choices.FORMULATIONS, help="change how mask and softmax are combined")
    parser.add_argument("--strength", type=float, default=1.0, help="factor on the log-decays (default: %(default)s)")
    parser.add_argument(
        "--decays",
        choices=("model", "edges"),
        default="model",
        help="edges: set decays from the image's edges (default: %(default)s)",
    )


def _add_attention(parser: argparse.ArgumentParser) -> None:
    _add_heads(parser)
    _head_option(parser)
    parser.add_argument("--frames", type=int, help="frames of a .gif (default: 24)")


def _add_cost(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--largest", type=int, default=256, help="side of the largest grid (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timings per grid (default: %(default)s)")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="measure time only")


def _add_receptive(parser: argparse.ArgumentParser) -> None:
    add_subject(parser, default="ppma_nano")
    parser.add_argument("--masks", help="comma-separated masks to compare, with --model (default: none,rmt,2d)")
    parser.add_argument("--stage", type=int, default=3, help="stage of the features, 1-based (default: %(default)s)")
    parser.add_argument("--images", type=int, default=8, help="number of noise images (default: %(default)s)")


FIGURES = {
    "paths": ("both polyline paths between two tokens", _add_paths),
    "pairs": ("the paths between all pairs of tokens: 81 on a 3 x 3 grid", _add_pairs),
    "masks": ("the structured masks for one query", _add_masks),
    "attention": ("decays, mask and attention of a query; .gif: animated over queries", _add_attention),
    "heads": ("decays, mask and attention of a query for every head", _add_heads),
    "cost": ("measured time and memory against the number of tokens", _add_cost),
    "receptive-field": ("influence of each pixel on the central features", _add_receptive),
}

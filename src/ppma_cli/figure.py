"""`ppma figure`: the options of each figure. All counts start at 1."""

import argparse
from pathlib import Path

from ppma_cli import choices
from ppma_cli.model_options import add_subject

HELP = "draw paths, masks, attention, costs: .png, .pdf, .svg, .gif"

Pair = tuple[int, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The figure's name with its own options, and where to write it."""
    figures = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, (text, add_options) in FIGURES.items():
        figure = figures.add_parser(name, help=text, description=text)
        add_options(figure)
        formats = ".png, .pdf, .svg or .gif" if name == "attention" else ".png, .pdf or .svg"
        figure.add_argument("--out", type=Path, required=True, help=f"a {formats} file")


def run(arguments: argparse.Namespace) -> int:
    """Draw and write a figure."""
    from ppma.explore import figures

    figures.write(arguments)
    print(f"Written to {arguments.out}")
    return 0


def _pair(text: str) -> Pair:
    """Two numbers, "3,4"."""
    try:
        first, second = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two whole numbers such as 3,4, got {text!r}") from None
    return first, second


def _query_option(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    said = "the middle" if default is None else default
    text = f"ROW,COLUMN of the query token, from 1,1 (default: {said})"
    parser.add_argument("--query", type=_pair, metavar="ROW,COLUMN", default=default and _pair(default), help=text)


def _where_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stage", type=int, help="from 1 (default: 1)")
    parser.add_argument("--block", type=int, help="of the stage, from 1 (default: 1)")


def _head_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head", type=int, help="from 1 (default: the mean over the heads)")


def _add_paths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grid", type=_pair, default=(6, 8), metavar="ROWS,COLUMNS", help="(default: 6,8)")
    _query_option(parser, "2,2")
    parser.add_argument("--key", type=_pair, default=(5, 7), metavar="ROW,COLUMN", help="(default: 5,7)")


def _add_pairs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--side", type=int, default=3, help="of the grid, at most 4 (default: %(default)s)")
    parser.add_argument("--path", choices=choices.PATHS, default="v2h")


def _add_masks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--side", type=int, help="tokens in a row and in a column, without --checkpoint (default: 24)")
    parser.add_argument("--image", help="a file or a sample whose edges make the decays (default: a disc)")
    parser.add_argument("--checkpoint", type=Path, help="use the decays that this model has for the image instead")
    _where_options(parser)
    _head_option(parser)
    _query_option(parser)


def _add_heads(parser: argparse.ArgumentParser) -> None:
    add_subject(parser, default="ppma_nano")
    parser.add_argument("--image", default="cat", help="a file or a sample (default: %(default)s)")
    _where_options(parser)
    _query_option(parser)
    parser.add_argument("--mask", choices=choices.MASKS, help="what if this attention had another mask")
    parser.add_argument("--formulation", choices=choices.FORMULATIONS, help="what if it were combined so")
    parser.add_argument("--strength", type=float, default=1.0, help="what if log-decays were so many times as large")
    parser.add_argument(
        "--decays", choices=("model", "edges"), default="model", help="edges: set from the image's edges, not learned"
    )


def _add_attention(parser: argparse.ArgumentParser) -> None:
    _add_heads(parser)
    _head_option(parser)
    parser.add_argument("--frames", type=int, help="of a .gif (default: 24)")


def _add_cost(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--largest", type=int, default=256, help="side of the largest grid (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each (default: %(default)s)")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="measure time only")


def _add_receptive(parser: argparse.ArgumentParser) -> None:
    add_subject(parser, default="ppma_nano")
    parser.add_argument("--masks", help="comma-separated, for --model: with each of them (default: none,rmt,2d)")
    parser.add_argument("--stage", type=int, default=3, help="whose features, from 1 (default: %(default)s)")
    parser.add_argument("--images", type=int, default=8, help="images of noise (default: %(default)s)")


FIGURES = {
    "paths": ("both polyline paths between two tokens", _add_paths),
    "pairs": ("the paths between all pairs of tokens: 81 on a 3 x 3 grid", _add_pairs),
    "masks": ("the structured masks side by side, for one query", _add_masks),
    "attention": ("decays, mask and attention of a query; .gif: it moves", _add_attention),
    "heads": ("the same for every head", _add_heads),
    "cost": ("time and memory against the number of tokens, measured now", _add_cost),
    "receptive-field": ("how much each pixel moves the features in the middle", _add_receptive),
}

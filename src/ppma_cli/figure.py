"""`ppma figure`: the options of each figure. Indices are 1-based."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ppma_cli import choices
from ppma_cli.model_options import add_subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELP = "draw paths, masks, attention or costs to .png, .pdf, .svg or .gif"

_FORMATS = {"attention": ".png, .pdf, .svg or .gif", "selectivity": ".png, .pdf, .svg; .csv or .json for the table"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand per figure."""
    figures = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, (text, add_options) in FIGURES.items():
        figure = figures.add_parser(name, help=text, description=text)
        add_options(figure)
        figure.add_argument(
            "--width", type=float, help="exact width in inches: 3.4 for a column, 7 for a page (default: as drawn)"
        )
        formats = _FORMATS.get(name, ".png, .pdf or .svg")
        several = {"nargs": "+", "metavar": "FILE"} if name == "selectivity" else {}
        figure.add_argument("--out", type=Path, required=True, help=f"output file: {formats}", **several)


def run(arguments: argparse.Namespace) -> int:
    """Draw a figure and write it."""
    from ppma.explore import figures

    # `ppma.explore` does not know the tasks.
    summary = figures.write(arguments, {**figures.DRAW, "segmentation": _draw_segmentation})
    if summary is not None:
        print(summary)
    written = arguments.out if isinstance(arguments.out, list) else [arguments.out]
    print(f"wrote {', '.join(map(str, written))}")
    return 0


def _draw_segmentation(arguments: argparse.Namespace) -> "Figure":
    from ppma.explore import style
    from ppma.explore.images import find_image
    from ppma.explore.subject import default_name
    from ppma.tasks.segmentation.inside import look_figure

    image = find_image(arguments.image)
    source = arguments.checkpoint or arguments.model or default_name("segmentation")
    return look_figure(source, image, arguments.wanted, width=arguments.width or style.PAGE)


def _numbers(text: str, example: str, word: str) -> tuple[int, ...]:
    """Parse as many integers as the example has, separated by commas."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != len(example.split(",")):
        raise argparse.ArgumentTypeError(f"expected {word} whole numbers such as {example}, got {text!r}")
    return numbers


def _pair(text: str) -> tuple[int, ...]:
    return _numbers(text, "3,4", "two")


def _triple(text: str) -> tuple[int, ...]:
    return _numbers(text, "2,3,4", "three")


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
    _add_grid(parser, "6,8")
    _query_option(parser, "2,2")
    parser.add_argument(
        "--key", type=_pair, default=(5, 7), metavar="ROW,COLUMN", help="key token, 1-based (default: 5,7)"
    )


def _add_grid(parser: argparse.ArgumentParser, default: str) -> None:
    text = f"grid size (default: {default})"
    parser.add_argument("--grid", type=_pair, default=_pair(default), metavar="ROWS,COLUMNS", help=text)


def _add_paths_3d(parser: argparse.ArgumentParser) -> None:
    for option, default, text in (
        ("--grid", "4,5,6", "grid size"),
        ("--query", "1,2,2", "query token, 1-based"),
        ("--key", "4,4,5", "key token, 1-based"),
    ):
        text = f"{text} (default: {default})"
        parser.add_argument(option, type=_triple, default=_triple(default), metavar="DEPTH,ROW,COLUMN", help=text)


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
    add_subject(parser)
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


def _add_segmentation(parser: argparse.ArgumentParser) -> None:
    add_subject(parser)
    parser.add_argument("--image", default="dog", help="image file or sample (default: %(default)s)")
    parser.add_argument(
        "--class", dest="wanted", metavar="NAME", help="class of the query (default: the largest, without background)"
    )


def _add_selectivity(parser: argparse.ArgumentParser) -> None:
    add_subject(parser)
    parser.add_argument("--image", nargs="+", help="image files, folders or samples (default: all samples)")
    parser.add_argument("--untrained", action="store_true", help="compare with random weights of the same architecture")


def _add_cost(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--largest", type=int, default=256, help="side of the largest grid (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timings per grid (default: %(default)s)")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="measure time only")


def _add_receptive(parser: argparse.ArgumentParser) -> None:
    add_subject(parser)
    parser.add_argument("--masks", help="comma-separated masks of an architecture to compare, with random weights")
    parser.add_argument("--stage", type=int, default=3, help="stage of the features, 1-based (default: %(default)s)")
    parser.add_argument("--images", type=int, default=8, help="number of noise images (default: %(default)s)")


def _add_regions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", type=Path, required=True, help="weights of `ppma train regions`")
    parser.add_argument("--split", default="test", help="train, val, test, larger or scaled (default: %(default)s)")
    parser.add_argument("--index", type=int, default=1, help="image of the split, 1-based (default: %(default)s)")
    parser.add_argument("--query", type=_pair, metavar="ROW,COLUMN", help="query, 1-based (default: the first dot)")


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=Path, required=True, help="folder of `ppma ablate` or `ppma compare`")


FIGURES = {
    "scans": ("scan orders, and how far apart they take neighbouring tokens", lambda parser: _add_grid(parser, "8,8")),
    "paths": ("both polyline paths between two tokens", _add_paths),
    "paths-3d": ("both polyline paths between two tokens of a 3D grid", _add_paths_3d),
    "matrices": ("the decomposition L = LH x LV as matrices", lambda parser: _add_grid(parser, "4,4")),
    "pairs": ("the paths between all pairs of tokens: 81 on a 3 x 3 grid", _add_pairs),
    "masks": ("the structured masks for one query", _add_masks),
    "attention": ("decays, mask and attention of a query; .gif: animated over queries", _add_attention),
    "heads": ("decays, mask and attention of a query for every head", _add_heads),
    "segmentation": ("what a segmentation model finds, and decays, mask and attention of a query", _add_segmentation),
    "selectivity": ("correlation of 1 - decay with the image gradient, by layer and head", _add_selectivity),
    "cost": ("measured time and memory against the number of tokens", _add_cost),
    "receptive-field": ("influence of each pixel on the central features", _add_receptive),
    "regions": ("learned decays of the regions task: they draw the walls", _add_regions),
    "regions-sizes": ("accuracy of `ppma ablate regions` against the size of the grid", _add_runs),
    "learning": ("metric of each variant of a study against the training steps", _add_runs),
}

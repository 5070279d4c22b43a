"""The figures of `ppma figure`: the options of each, and how it is drawn from them. All counts start at 1 here."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from ppma.explore import attention, cost, gallery, paths, receptive, style
from ppma.explore.capture import AttentionRecord, capture_image, find_record
from ppma.explore.command import model_options
from ppma.explore.images import find_image
from ppma.explore.query import WhatIf, decays, query_panels
from ppma.explore.subject import Subject, from_name, open_subject
from ppma.layers.attention import FORMULATIONS
from ppma.masks import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Pair = tuple[int, int]

# Limits of what is still to be seen, or is drawn in minutes.
LARGEST_PATHS = 40  # rows or columns
LARGEST_MASKS = 64  # a dense mask has the fourth power of it
MOST_FRAMES = 360
MOST_ROUNDS = 1000
MOST_IMAGES = 512


def add_figures(figures: Any) -> None:
    """Add a parser for each figure; `arguments.write(arguments)` draws and writes it."""
    _add_paths(figures.add_parser("paths", help="both polyline paths between two tokens"))
    _add_pairs(figures.add_parser("pairs", help="the paths between all pairs of tokens: 81 on a 3 x 3 grid"))
    _add_masks(figures.add_parser("masks", help="the structured masks side by side, for one query"))
    _add_attention(figures.add_parser("attention", help="decays, mask and attention of a query; .gif: it moves"))
    _add_heads(figures.add_parser("heads", help="the same for every head"))
    _add_cost(figures.add_parser("cost", help="time and memory against the number of tokens, measured now"))
    _add_receptive(figures.add_parser("receptive-field", help="how much each pixel moves the features in the middle"))


def _pair(text: str) -> Pair:
    """Two numbers, "3,4"."""
    try:
        first, second = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two whole numbers such as 3,4, got {text!r}") from None
    return first, second


def _within(name: str, value: int, high: int, low: int = 1) -> int:
    """A number that a user gave, if it lies between the two."""
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low} to {high}, got {value}")
    return value


def _token(name: str, given: Pair, grid: Pair) -> Pair:
    """A token of the grid that a user counted from 1,1."""
    row, column = given
    if not (1 <= row <= grid[0] and 1 <= column <= grid[1]):
        raise ValueError(f"{name}: expected 1,1 to {grid[0]},{grid[1]}, the tokens of the grid, got {row},{column}")
    return row - 1, column - 1


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    """These options would be ignored here."""
    for name in names:
        if getattr(arguments, name) is not None:
            raise ValueError(f"{name}: {why}")


def _out(parser: argparse.ArgumentParser, write: Any, formats: str = ".png, .pdf or .svg") -> None:
    parser.add_argument("--out", type=Path, required=True, help=f"a {formats} file")
    parser.set_defaults(write=write)


def _writes(draw: Any) -> Any:
    """Turn what draws a figure into what writes it."""

    def write(arguments: argparse.Namespace) -> None:
        style.check_out(arguments.out, style.FORMATS)  # before minutes of measuring
        figure: Figure = draw(arguments)
        style.save(figure, arguments.out)

    return write


def _query_option(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    said = "the middle" if default is None else default
    text = f"ROW,COLUMN of the query token, from 1,1 (default: {said})"
    parser.add_argument("--query", type=_pair, metavar="ROW,COLUMN", default=default and _pair(default), help=text)


def _add_paths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grid", type=_pair, default=(6, 8), metavar="ROWS,COLUMNS", help="(default: 6,8)")
    _query_option(parser, "2,2")
    parser.add_argument("--key", type=_pair, default=(5, 7), metavar="ROW,COLUMN", help="(default: 5,7)")
    _out(parser, _writes(_draw_paths))


def _draw_paths(arguments: argparse.Namespace) -> "Figure":
    if not all(1 <= extent <= LARGEST_PATHS for extent in arguments.grid):
        rows, columns = arguments.grid
        raise ValueError(f"grid: expected 1,1 to {LARGEST_PATHS},{LARGEST_PATHS}, got {rows},{columns}")
    query, key = (_token(name, getattr(arguments, name), arguments.grid) for name in ("query", "key"))
    return paths.path_figure(query, key, arguments.grid)


def _add_pairs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--side", type=int, default=3, help="of the grid, at most 4 (default: %(default)s)")
    parser.add_argument("--path", choices=tuple(paths.LINES), default="v2h")
    _out(parser, _writes(lambda a: paths.path_gallery(a.side, a.path)))


def _add_masks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--side", type=int, help="tokens in a row and in a column, without --checkpoint (default: 24)")
    parser.add_argument("--image", help="a file or a sample whose edges make the decays (default: a disc)")
    parser.add_argument("--checkpoint", type=Path, help="use the decays that this model has for the image instead")
    _where_options(parser)
    _head_option(parser)
    _query_option(parser)
    _out(parser, _writes(_draw_masks))


def _draw_masks(arguments: argparse.Namespace) -> "Figure":
    if arguments.checkpoint is not None:
        _refuse(arguments, ("side",), "expected without --checkpoint, whose grid is the model's")
        _, record = _look(open_subject(arguments.checkpoint, ""), arguments.image or "cat", arguments)
        shape = (record.q.shape[0], record.heads, *record.grid)
        of_heads = [decay.expand(shape)[0] for decay in decays(record.mask)]
        head = _head(arguments, record)
        log_decays = [values.mean(0) if head is None else values[head] for values in of_heads]
    else:
        _refuse(arguments, ("stage", "block", "head"), "expected with --checkpoint only")
        side = _within("side", 24 if arguments.side is None else arguments.side, LARGEST_MASKS)
        image = gallery.disc(side) if arguments.image is None else _tokens(arguments.image, (side, side))
        log_decays = list(gallery.edge_decays(image))
    log_alpha, log_beta = log_decays
    grid = (log_alpha.shape[0], log_alpha.shape[1])
    # A little off the middle, where a disc would hide that the masks differ.
    middle = (3 * grid[0] // 8, grid[1] // 3)
    query = middle if arguments.query is None else _token("query", arguments.query, grid)
    return gallery.mask_gallery(log_alpha, log_beta, query)


def _tokens(image: str, grid: Pair) -> Tensor:
    """An image with one pixel for each token, (3, H, W)."""
    from timm.data.transforms import ToTensor

    return F.adaptive_avg_pool2d(ToTensor()(find_image(image)), grid)


def _where_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stage", type=int, help="from 1 (default: 1)")
    parser.add_argument("--block", type=int, help="of the stage, from 1 (default: 1)")


def _head_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head", type=int, help="from 1 (default: the mean over the heads)")


def _query_options(parser: argparse.ArgumentParser) -> None:
    model_options(parser, default="ppma_nano")
    parser.add_argument("--image", default="cat", help="a file or a sample (default: %(default)s)")
    _where_options(parser)
    _query_option(parser)
    parser.add_argument("--mask", choices=tuple(KINDS), help="what if this attention had another mask")
    parser.add_argument("--formulation", choices=tuple(FORMULATIONS), help="what if it were combined so")
    parser.add_argument("--strength", type=float, default=1.0, help="what if log-decays were so many times as large")
    parser.add_argument(
        "--decays", choices=("model", "edges"), default="model", help="edges: set from the image's edges, not learned"
    )


def _look(subject: Subject, image: str, arguments: argparse.Namespace) -> tuple[Tensor, AttentionRecord]:
    """The image as the model sees it, and the attention that was asked for."""
    depths = subject.model.config.depths
    stage = _within("stage", 1 if arguments.stage is None else arguments.stage, len(depths))
    block = _within("block", 1 if arguments.block is None else arguments.block, depths[stage - 1])
    prepared = subject.prepare(find_image(image))
    return subject.shown(prepared), find_record(capture_image(subject.model, prepared), stage - 1, block - 1)


def _what_if(arguments: argparse.Namespace) -> tuple[Tensor, AttentionRecord, Pair]:
    """The image, the attention after all what-ifs, and the query."""
    image, record = _look(open_subject(arguments.checkpoint, arguments.model), arguments.image, arguments)
    edges = gallery.edge_decays(F.adaptive_avg_pool2d(image, record.grid)) if arguments.decays == "edges" else None
    change = WhatIf(arguments.mask, arguments.formulation, edges, arguments.strength)
    middle = record.grid[0] // 2, record.grid[1] // 2
    query = middle if arguments.query is None else _token("query", arguments.query, record.grid)
    return image, change(record), query


def _head(arguments: argparse.Namespace, record: AttentionRecord) -> int | None:
    return None if arguments.head is None else _within("head", arguments.head, record.heads) - 1


def _add_attention(parser: argparse.ArgumentParser) -> None:
    _query_options(parser)
    _head_option(parser)
    parser.add_argument("--frames", type=int, help="of a .gif (default: 24)")
    _out(parser, _write_attention, ".png, .pdf, .svg or .gif")


def _write_attention(arguments: argparse.Namespace) -> None:
    style.check_out(arguments.out, (*style.FORMATS, ".gif"))
    moving = arguments.out.suffix.lower() == ".gif"
    if moving:
        _refuse(arguments, ("query",), "expected without a .gif, where the query moves")
    else:
        _refuse(arguments, ("frames",), "expected with a .gif only")
    frames = _within("frames", 24 if arguments.frames is None else arguments.frames, MOST_FRAMES)
    image, record, query = _what_if(arguments)
    head = _head(arguments, record)
    if moving:
        queries = attention.walk(record.grid, frames)
        attention.save_gif(attention.query_animation(image, record, queries, head=head), arguments.out)
    else:
        panels = query_panels(record, query, head=head)
        style.save(attention.query_figure(image, panels, query), arguments.out)


def _add_heads(parser: argparse.ArgumentParser) -> None:
    _query_options(parser)
    _out(parser, _writes(lambda arguments: attention.heads_figure(*_what_if(arguments))))


def _add_cost(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--largest", type=int, default=256, help="side of the largest grid (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each (default: %(default)s)")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="measure time only")
    _out(parser, _writes(_draw_cost))


def _draw_cost(arguments: argparse.Namespace) -> "Figure":
    rounds = _within("rounds", arguments.rounds, MOST_ROUNDS)
    return cost.cost_figure(cost.measure(arguments.largest, rounds=rounds, memory=arguments.memory))


def _add_receptive(parser: argparse.ArgumentParser) -> None:
    model_options(parser, default="ppma_nano")
    parser.add_argument("--masks", help="comma-separated, for --model: with each of them (default: none,rmt,2d)")
    parser.add_argument("--stage", type=int, default=3, help="whose features, from 1 (default: %(default)s)")
    parser.add_argument("--images", type=int, default=8, help="images of noise (default: %(default)s)")
    _out(parser, _writes(_draw_receptive))


def _draw_receptive(arguments: argparse.Namespace) -> "Figure":
    count = _within("images", arguments.images, MOST_IMAGES)
    if arguments.checkpoint is not None:
        _refuse(arguments, ("masks",), "expected without --checkpoint, which has one")
        subjects = [open_subject(arguments.checkpoint, "")]
        names = [subjects[0].name]
    else:
        names = ("none,rmt,2d" if arguments.masks is None else arguments.masks).split(",")
        if len(set(names)) < len(names):
            raise ValueError(f"masks: expected each mask once, got {arguments.masks}")
        subjects = [from_name(arguments.model, mask=mask) for mask in names]
    fields = {}
    for name, subject in zip(names, subjects, strict=True):
        stage = _within("stage", arguments.stage, len(subject.model.config.depths)) - 1
        images = receptive.noise_images(count, subject.preprocessing.image_size)
        fields[name] = receptive.effective_receptive_field(subject.model, images, stage)
    return receptive.receptive_field_figure(fields)

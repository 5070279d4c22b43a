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
    first, second = (int(part) for part in text.split(","))
    return first, second


def _from_one(pair: Pair) -> Pair:
    return pair[0] - 1, pair[1] - 1


def _out(parser: argparse.ArgumentParser, write: Any, formats: str = ".png, .pdf or .svg") -> None:
    parser.add_argument("--out", type=Path, required=True, help=f"a {formats} file")
    parser.set_defaults(write=write)


def _writes(draw: Any) -> Any:
    """Turn what draws a figure into what writes it."""

    def write(arguments: argparse.Namespace) -> None:
        style.check_format(arguments.out, style.FORMATS)  # before minutes of measuring
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
    _out(parser, _writes(lambda a: paths.path_figure(_from_one(a.query), _from_one(a.key), a.grid)))


def _add_pairs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--side", type=int, default=3, help="of the grid, at most 4 (default: %(default)s)")
    parser.add_argument("--path", choices=tuple(paths.LINES), default="v2h")
    _out(parser, _writes(lambda a: paths.path_gallery(a.side, a.path)))


def _add_masks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--side", type=int, default=24, help="tokens in a row and in a column (default: %(default)s)")
    parser.add_argument("--image", help="a file or a sample whose edges make the decays (default: a disc)")
    parser.add_argument("--checkpoint", type=Path, help="use the decays that this model has for the image instead")
    _where_options(parser)
    _query_option(parser)
    _out(parser, _writes(_draw_masks))


def _draw_masks(arguments: argparse.Namespace) -> "Figure":
    if arguments.checkpoint is not None:
        _, record = _look(open_subject(arguments.checkpoint, ""), arguments.image or "cat", arguments)
        shape = (record.q.shape[0], record.heads, *record.grid)
        of_heads = [decay.expand(shape)[0] for decay in decays(record.mask)]
        head = _head(arguments)
        log_decays = [values.mean(0) if head is None else values[head] for values in of_heads]
    else:
        side = (arguments.side, arguments.side)
        image = gallery.disc(arguments.side) if arguments.image is None else _tokens(arguments.image, side)
        log_decays = list(gallery.edge_decays(image))
    log_alpha, log_beta = log_decays
    grid = (log_alpha.shape[0], log_alpha.shape[1])
    # A little off the middle, where a disc would hide that the masks differ.
    query = (3 * grid[0] // 8, grid[1] // 3) if arguments.query is None else _from_one(arguments.query)
    return gallery.mask_gallery(log_alpha, log_beta, query)


def _tokens(image: str, grid: Pair) -> Tensor:
    """An image with one pixel for each token, (3, H, W)."""
    from timm.data.transforms import ToTensor

    return F.adaptive_avg_pool2d(ToTensor()(find_image(image)), grid)


def _where_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stage", type=int, default=1, help="from 1 (default: %(default)s)")
    parser.add_argument("--block", type=int, default=1, help="of the stage, from 1 (default: %(default)s)")
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
    prepared = subject.prepare(find_image(image))
    record = find_record(capture_image(subject.model, prepared), arguments.stage - 1, arguments.block - 1)
    return subject.shown(prepared), record


def _what_if(arguments: argparse.Namespace) -> tuple[Tensor, AttentionRecord, Pair]:
    """The image, the attention after all what-ifs, and the query."""
    image, record = _look(open_subject(arguments.checkpoint, arguments.model), arguments.image, arguments)
    edges = gallery.edge_decays(F.adaptive_avg_pool2d(image, record.grid)) if arguments.decays == "edges" else None
    change = WhatIf(arguments.mask, arguments.formulation, edges, arguments.strength)
    middle = record.grid[0] // 2, record.grid[1] // 2
    return image, change(record), middle if arguments.query is None else _from_one(arguments.query)


def _head(arguments: argparse.Namespace) -> int | None:
    return None if arguments.head is None else arguments.head - 1


def _add_attention(parser: argparse.ArgumentParser) -> None:
    _query_options(parser)
    parser.add_argument("--frames", type=int, default=24, help="of a .gif (default: %(default)s)")
    _out(parser, _write_attention, ".png, .pdf, .svg or .gif")


def _write_attention(arguments: argparse.Namespace) -> None:
    style.check_format(arguments.out, (*style.FORMATS, ".gif"))
    image, record, query = _what_if(arguments)
    head = _head(arguments)
    if arguments.out.suffix.lower() == ".gif":
        queries = attention.walk(record.grid, arguments.frames)
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
    _out(parser, _writes(lambda a: cost.cost_figure(cost.measure(a.largest, rounds=a.rounds, memory=a.memory))))


def _add_receptive(parser: argparse.ArgumentParser) -> None:
    model_options(parser, default="ppma_nano")
    parser.add_argument(
        "--masks", default="none,rmt,2d", help="comma-separated, for --model: with each of them (default: %(default)s)"
    )
    parser.add_argument("--stage", type=int, default=3, help="whose features, from 1 (default: %(default)s)")
    parser.add_argument("--images", type=int, default=8, help="images of noise (default: %(default)s)")
    _out(parser, _writes(_draw_receptive))


def _draw_receptive(arguments: argparse.Namespace) -> "Figure":
    if arguments.checkpoint is not None:
        subjects = [open_subject(arguments.checkpoint, "")]
        names = [subjects[0].name]
    else:
        names = arguments.masks.split(",")
        subjects = [from_name(arguments.model, mask=mask) for mask in names]
    fields = {}
    for name, subject in zip(names, subjects, strict=True):
        images = receptive.noise_images(arguments.images, subject.data.image_size)
        fields[name] = receptive.effective_receptive_field(subject.model, images, arguments.stage - 1)
    return receptive.receptive_field_figure(fields)

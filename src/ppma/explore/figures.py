"""The figures of `ppma figure`, drawn from its options. Indices in options are 1-based."""

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from ppma.atomic import write_atomically
from ppma.data.decoding import image_files
from ppma.data.regions import Regions
from ppma.explore import attention, cost, gallery, matrices, paths, receptive, regions, scans, selectivity, style
from ppma.explore.capture import AttentionRecord, capture_image, find_record
from ppma.explore.images import find_image, sample_names
from ppma.explore.query import WhatIf, decays, query_panels
from ppma.explore.subject import Subject, default_name, from_name, open_subject, untrained
from ppma.models import open_checkpoint
from ppma.models.grid import load_grid
from ppma.models.published import PUBLISHED
from ppma.outputs import check_target
from ppma.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Pair = tuple[int, int]
Draw = Callable[[argparse.Namespace], "Figure"]

# Limits of what is legible, or takes minutes.
LARGEST_PATHS = 40  # rows or columns
LARGEST_3D = 12  # tokens along an axis
LARGEST_MATRICES = 8  # rows or columns
LARGEST_MASKS = 64  # a dense mask has side^4 entries
NARROWEST, WIDEST = 2, 20  # inches
MOST_FRAMES = 360
MOST_ROUNDS = 1000
MOST_IMAGES = 512


def _within(name: str, value: int, high: int, low: int = 1) -> int:
    """Check the range of an option."""
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low} to {high}, got {value}")
    return value


def _check_grid(grid: Pair, largest: int) -> Pair:
    """Check the size of a grid."""
    if not all(1 <= extent <= largest for extent in grid):
        raise ValueError(f"grid: expected 1,1 to {largest},{largest}, got {_listed(grid)}")
    return grid


def _token(name: str, given: Pair, grid: Pair) -> Pair:
    """Convert a 1-based token to a 0-based one and check that it is on the grid."""
    row, column = given
    if not (1 <= row <= grid[0] and 1 <= column <= grid[1]):
        raise ValueError(f"{name}: expected 1,1 to {grid[0]},{grid[1]}, the tokens of the grid, got {row},{column}")
    return row - 1, column - 1


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    """Raise a ValueError if options are given that would be ignored."""
    for name in names:
        if getattr(arguments, name) is not None:
            raise ValueError(f"{name}: {why}")


def write(arguments: argparse.Namespace, draw: Mapping[str, Draw] | None = None) -> str | None:
    """Draw the figure `arguments.name` and write it to `arguments.out`; returns what it shows in words, if anything.

    Args:
        arguments: the options of `ppma figure`.
        draw: the figures, None for `DRAW`.
    """
    if arguments.width is not None and not NARROWEST <= arguments.width <= WIDEST:
        raise ValueError(f"width: expected {NARROWEST} to {WIDEST} inches, got {arguments.width:g}")
    with Progress(f"drawing {arguments.name}"):
        if arguments.name in WRITE:
            return WRITE[arguments.name](arguments)
        check_target("out", arguments.out, style.FORMATS)  # before minutes of measuring
        style.save((draw or DRAW)[arguments.name](arguments), arguments.out, width=arguments.width)
        return None


def _subject(arguments: argparse.Namespace) -> Subject:
    return open_subject(arguments.checkpoint, arguments.model or default_name())


def _width(arguments: argparse.Namespace) -> float:
    """The width for which a figure chooses its rows and columns."""
    return style.PAGE if arguments.width is None else arguments.width


def _draw_paths(arguments: argparse.Namespace) -> "Figure":
    _check_grid(arguments.grid, LARGEST_PATHS)
    query, key = (_token(name, getattr(arguments, name), arguments.grid) for name in ("query", "key"))
    return paths.path_figure(query, key, arguments.grid)


def _draw_masks(arguments: argparse.Namespace) -> "Figure":
    if arguments.checkpoint is not None:
        _refuse(arguments, ("side",), "expected without --checkpoint, whose grid is the model's")
        _, record = _capture(open_subject(arguments.checkpoint, ""), arguments.image or "cat", arguments)
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
    # Off centre: in the middle of a disc the masks look alike.
    middle = (3 * grid[0] // 8, grid[1] // 3)
    query = middle if arguments.query is None else _token("query", arguments.query, grid)
    return gallery.mask_gallery(log_alpha, log_beta, query, width=_width(arguments))


def _tokens(image: str, grid: Pair) -> Tensor:
    """Load an image at one pixel per token, (3, H, W)."""
    from timm.data.transforms import ToTensor

    return F.adaptive_avg_pool2d(ToTensor()(find_image(image)), grid)


def _capture(subject: Subject, image: str, arguments: argparse.Namespace) -> tuple[Tensor, AttentionRecord]:
    """The image as the model sees it, and the selected attention."""
    model: Any = subject.model
    depths = (len(model.blocks),) if hasattr(model, "blocks") else subject.backbone.config.depths
    stage = _within("stage", 1 if arguments.stage is None else arguments.stage, len(depths))
    block = _within("block", 1 if arguments.block is None else arguments.block, depths[stage - 1])
    prepared = subject.prepare(find_image(image))
    return subject.shown(prepared), find_record(capture_image(model, prepared), stage - 1, block - 1)


def _what_if(arguments: argparse.Namespace) -> tuple[Tensor, AttentionRecord, Pair]:
    """The image, the selected attention with the requested changes, and the query."""
    image, record = _capture(_subject(arguments), arguments.image, arguments)
    edges = gallery.edge_decays(F.adaptive_avg_pool2d(image, record.grid)) if arguments.decays == "edges" else None
    change = WhatIf(arguments.mask, arguments.formulation, edges, arguments.strength)
    middle = record.grid[0] // 2, record.grid[1] // 2
    query = middle if arguments.query is None else _token("query", arguments.query, record.grid)
    return image, change(record), query


def _head(arguments: argparse.Namespace, record: AttentionRecord) -> int | None:
    return None if arguments.head is None else _within("head", arguments.head, record.heads) - 1


def _write_attention(arguments: argparse.Namespace) -> None:
    check_target("out", arguments.out, (*style.FORMATS, ".gif"))
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
        figure = attention.query_figure(image, panels, query, width=_width(arguments))
        style.save(figure, arguments.out, width=arguments.width)


def _draw_paths_3d(arguments: argparse.Namespace) -> "Figure":
    grid, tokens = arguments.grid, (arguments.query, arguments.key)
    if not all(1 <= extent <= LARGEST_3D for extent in grid):
        raise ValueError(f"grid: expected 1 to {LARGEST_3D} along each axis, got {_listed(grid)}")
    for name, token in zip(("query", "key"), tokens, strict=True):
        if not all(1 <= index <= extent for index, extent in zip(token, grid, strict=True)):
            raise ValueError(f"{name}: expected 1,1,1 to {_listed(grid)}, the tokens of the grid, got {_listed(token)}")
    query, key = (tuple(index - 1 for index in token) for token in tokens)
    return paths.path_figure_3d(query, key, grid)


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def _draw_scans(arguments: argparse.Namespace) -> "Figure":
    return scans.scans_figure(_check_grid(arguments.grid, LARGEST_PATHS), width=_width(arguments))


def _draw_matrices(arguments: argparse.Namespace) -> "Figure":
    grid = _check_grid(arguments.grid, LARGEST_MATRICES)
    return matrices.factors_figure(*gallery.edge_decays(F.adaptive_avg_pool2d(gallery.disc(24), grid)))


def _write_selectivity(arguments: argparse.Namespace) -> str:
    tables = {".csv": selectivity.selectivity_csv, ".json": selectivity.selectivity_json}
    for path in arguments.out:
        check_target("out", path, (*style.FORMATS, *tables))
    files, problems = image_files(arguments.image or [*sample_names()])
    if problems:
        raise ValueError(f"image: {problems[0]}")
    images = [find_image(file) for file in files[: MOST_IMAGES + 1]]
    _within("image, number of files", len(images), MOST_IMAGES)
    subject = _subject(arguments)
    subjects = [subject, untrained(subject)] if arguments.untrained else [subject]
    rows = [row for one in subjects for row in selectivity.selectivity(one, images)]
    for path in arguments.out:
        if write_table := tables.get(path.suffix.lower()):
            write_atomically(path, write_table(rows).encode())
        else:
            style.save(selectivity.selectivity_figure(rows), path, width=arguments.width)
    return selectivity.selectivity_summary(rows)


def _draw_cost(arguments: argparse.Namespace) -> "Figure":
    rounds = _within("rounds", arguments.rounds, MOST_ROUNDS)
    measured = cost.measure(arguments.largest, rounds=rounds, memory=arguments.memory)
    return cost.cost_figure(measured, width=_width(arguments))


def _draw_receptive(arguments: argparse.Namespace) -> "Figure":
    count = _within("images", arguments.images, MOST_IMAGES)
    if arguments.masks is None:
        subjects = [_subject(arguments)]
        subjects += [untrained(subjects[0])] if subjects[0].trained else []
        names = [subject.name for subject in subjects]
    else:
        if arguments.checkpoint is not None or arguments.model in PUBLISHED:
            _refuse(arguments, ("masks",), "expected without --checkpoint and published weights, which have one")
        names = arguments.masks.split(",")
        if len(set(names)) < len(names):
            raise ValueError(f"masks: expected each mask once, got {arguments.masks}")
        subjects = [from_name(arguments.model or "ppma_nano", mask=mask) for mask in names]
    fields = {}
    for name, subject in zip(names, subjects, strict=True):
        stage = _within("stage", arguments.stage, len(subject.backbone.config.depths)) - 1
        images = receptive.noise_images(count, subject.preprocessing.image_size)
        fields[name] = receptive.effective_receptive_field(subject.backbone, images, stage)
    return receptive.receptive_field_figure(fields)


def _draw_regions(arguments: argparse.Namespace) -> "Figure":
    checkpoint = open_checkpoint(arguments.checkpoint)
    model, data = load_grid(checkpoint), Regions(regions.training_data(checkpoint), arguments.split)
    index = _within("index", arguments.index, len(data)) - 1
    query = None if arguments.query is None else _token("query", arguments.query, (data.size, data.size))
    return regions.decays_figure(model, data, index, query)


DRAW: dict[str, Draw] = {
    "scans": _draw_scans,
    "paths": _draw_paths,
    "paths-3d": _draw_paths_3d,
    "matrices": _draw_matrices,
    "pairs": lambda arguments: paths.path_gallery(arguments.side, arguments.path),
    "masks": _draw_masks,
    "heads": lambda arguments: attention.heads_figure(*_what_if(arguments)),
    "cost": _draw_cost,
    "receptive-field": _draw_receptive,
    "regions": _draw_regions,
    "regions-sizes": lambda arguments: regions.sizes_figure(arguments.runs),
    "learning": lambda arguments: regions.learning_figure(arguments.runs),
}

# Figures that write more than one kind of file.
WRITE: dict[str, Callable[[argparse.Namespace], str | None]] = {
    "attention": _write_attention,
    "selectivity": _write_selectivity,
}

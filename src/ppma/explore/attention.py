"""Figures of one query token: decays, mask and attention; per head; animated over queries."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from torch import Tensor

from ppma.explore import style
from ppma.explore.capture import AttentionRecord
from ppma.explore.query import QueryPanels, query_panels
from ppma.progress import track

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Token = tuple[int, int]


def token_size(image: Tensor, grid: tuple[int, int]) -> tuple[float, float]:
    """Height and width of a token in pixels.

    Args:
        image: (3, height, width).
        grid: (H, W).
    """
    return image.shape[1] / grid[0], image.shape[2] / grid[1]


def decay_limits(panels: Sequence[QueryPanels]) -> tuple[float, float]:
    """Common colour limits for decays: the minimum rounded down to a tenth, and 1."""
    inside = [values[~values.isnan()] for panel in panels for values in (panel.alpha, panel.beta)]
    smallest = min((values.min().item() for values in inside if values.numel()), default=0.0)
    return max(0.0, min(0.9, math.floor(10 * smallest) / 10)), 1.0


def attention_limits(panels: Sequence[QueryPanels]) -> tuple[float, float]:
    """Common colour limits for attention with and without the mask: 0 and the maximum."""
    return 0.0, max(max(panel.attention.max().item(), panel.masked_attention.max().item()) for panel in panels)


def query_figure(
    image: Tensor,
    panels: QueryPanels,
    query: Token,
    *,
    width: float = style.PAGE,
    scales: Sequence[QueryPanels] | None = None,
) -> "Figure":
    """Draw the image with the query, both decays, the mask, and the attention without and with it.

    Decays share one colour scale, the two attention maps another.

    Args:
        image: (3, height, width), values in [0, 1].
        panels: from `query_panels`.
        query: (i, j).
        width: of the figure, in inches.
        scales: panels that the colour scales span, for comparable figures; `panels` alone if None.
    """
    grid = (panels.mask.shape[0], panels.mask.shape[1])
    decay, attention = decay_limits(scales or [panels]), attention_limits(scales or [panels])
    figure = style.new_figure(width, 0.66 * width)
    first, second = figure.subplots(2, 3)
    style.show_image(first[0], image, "query")
    first[0].add_patch(style.token_box(query, grid, scale=token_size(image, grid)))
    style.heatmap(first[1], panels.alpha, "decay α", limits=decay, colours=style.DECAY_COLOURS)
    drawn = style.heatmap(first[2], panels.beta, "decay β", limits=decay, colours=style.DECAY_COLOURS)
    style.colour_bar(figure, drawn, first[2])
    drawn = style.heatmap(second[0], panels.mask, "mask", query=query)
    style.colour_bar(figure, drawn, second[0])
    style.heatmap(second[1], panels.attention, "no mask", limits=attention, query=query)
    drawn = style.heatmap(second[2], panels.masked_attention, "masked", limits=attention, query=query)
    style.colour_bar(figure, drawn, second[2], "attention")
    return figure


def heads_figure(image: Tensor, record: AttentionRecord, query: Token) -> "Figure":
    """Draw one column per head: decays, mask, attention without and with the mask; one colour scale per row.

    Args:
        image: (3, height, width), values in [0, 1].
        record: an attention of the model for this image.
        query: (i, j).
    """
    panels = [query_panels(record, query, head=head) for head in range(record.heads)]
    decay, attention = decay_limits(panels), attention_limits(panels)
    rows = [
        ("decay α", [p.alpha for p in panels], decay, style.DECAY_COLOURS, None),
        ("decay β", [p.beta for p in panels], decay, style.DECAY_COLOURS, None),
        ("mask", [p.mask for p in panels], (0.0, 1.0), style.WEIGHT_COLOURS, query),
        ("attention", [p.attention for p in panels], attention, style.WEIGHT_COLOURS, query),
        ("masked", [p.masked_attention for p in panels], attention, style.WEIGHT_COLOURS, query),
    ]
    side = min(1.2, style.PAGE / (1.6 + record.heads))
    figure = style.new_figure(side * (1.6 + record.heads), side * len(rows) + 0.2)
    grid = figure.subplots(len(rows), 1 + record.heads, squeeze=False)
    first, axes = grid[:, 0], grid[:, 1:]
    style.show_image(first[0], image, "query")
    first[0].add_patch(style.token_box(query, record.grid, scale=token_size(image, record.grid)))
    for axis in first[1:]:
        axis.set_axis_off()
    for row, (name, values, limits, colours, marked) in zip(axes, rows, strict=True):
        for axis, array in zip(row, values, strict=True):
            drawn = style.heatmap(axis, array, "", limits=limits, colours=colours, query=marked)
        row[0].set_ylabel(name, fontsize=style.FONT)
        style.colour_bar(figure, drawn, row, aspect=12)
    for head, axis in enumerate(axes[0]):
        axis.set_title(f"head {head + 1}", fontsize=style.FONT, pad=3)
    return figure


def walk(grid: tuple[int, int], steps: int = 24) -> list[Token]:
    """Tokens on a closed curve around the centre of the grid, without immediate repetitions."""
    H, W = grid
    tokens: list[Token] = []
    for step in range(steps):
        angle = 2 * math.pi * step / steps
        row = round((H - 1) * (0.5 - 0.36 * math.cos(angle)))
        column = round((W - 1) * (0.5 + 0.36 * math.sin(angle)))
        if not tokens or tokens[-1] != (row, column):
            tokens.append((row, column))
    return tokens


def query_animation(
    image: Tensor, record: AttentionRecord, queries: Sequence[Token], *, head: int | None = None, dpi: int = 110
) -> list[Image.Image]:
    """Render a `query_figure` for each query, all on the same colour scales.

    Args:
        image: (3, height, width), values in [0, 1].
        record: an attention of the model for this image.
        queries: tokens in order.
        head: 0-based; None for the mean over the heads.
        dpi: pixels per inch.
    """
    panels = [query_panels(record, query, head=head) for query in queries]
    return [
        style.render(query_figure(image, panel, query, scales=panels), dpi=dpi)
        for query, panel in track(list(zip(queries, panels, strict=True)), "frames")
    ]


def save_gif(frames: Sequence[Image.Image], path: Path, *, milliseconds: int = 200) -> None:
    """Write frames of equal size as a looping GIF."""
    # One palette for all frames keeps static regions identical and the file small. The query's box is too thin to get
    # a palette entry by itself.
    palette_source = frames[0].copy()
    palette_source.paste(style.QUERY_COLOUR, (0, 0, palette_source.width, palette_source.height // 10))
    palette = palette_source.quantize(colors=128)
    first, *rest = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    buffer = io.BytesIO()
    first.save(buffer, format="GIF", save_all=True, append_images=rest, duration=milliseconds, loop=0, optimize=True)
    style.write(path, buffer)

"""Figures of a trained classifier: decays, masks and attention of single images."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ppma.explore import capture_image, query_panels, style
from ppma.explore.attention import decay_limits

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def look_figure(model: nn.Module, images: Sequence[Tensor], titles: Sequence[str]) -> "Figure":
    """Plot decays, mask and attention of the first and the last grid, with a row for each image (3, height, width)."""
    names = ("decay α", "decay β", "mask", "attention", "last grid")
    figure = style.new_figure(style.PAGE, 1.25 * len(images))
    axes = figure.subplots(len(images), 1 + len(names), squeeze=False)
    for number, (row, image, title) in enumerate(zip(axes, images, titles, strict=True)):
        records = capture_image(model, image)
        first, last = records[0], next(record for record in reversed(records) if min(record.grid) >= 4)
        query, last_query = _brightest(image, first.grid), _brightest(image, last.grid)
        panels = query_panels(first, query)
        last_attention = query_panels(last, last_query).masked_attention
        decay = decay_limits([panels])
        values = [
            (panels.alpha, None, decay, style.DECAY_COLOURS),
            (panels.beta, None, decay, style.DECAY_COLOURS),
            (panels.mask, query, (0.0, 1.0), style.WEIGHT_COLOURS),
            (panels.masked_attention, query, (0.0, panels.masked_attention.max().item()), style.WEIGHT_COLOURS),
            (last_attention, last_query, (0.0, last_attention.max().item()), style.WEIGHT_COLOURS),
        ]
        row[0].imshow(image.mean(0).numpy(), cmap="gray")
        style.hide_ticks(row[0], title, size=style.SMALL)
        for axis, (panel, marked, limits, colours), name in zip(row[1:], values, names, strict=True):
            drawn = style.heatmap(axis, panel, "" if number else name, limits=limits, colours=colours, query=marked)
            if name != "decay α":  # both decays share the scale
                style.colour_bar(figure, drawn, axis, aspect=12)
    return figure


def _brightest(image: Tensor, grid: tuple[int, int]) -> tuple[int, int]:
    """The (row, column) of the token with the brightest pixels."""
    token = int(nn.functional.adaptive_avg_pool2d(image.mean(0)[None], grid).argmax())
    return token // grid[1], token % grid[1]

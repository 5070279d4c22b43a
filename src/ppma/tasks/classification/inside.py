"""Figures of a trained classifier: decays, masks and attention of single images."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ppma.explore import capture_image, query_panels, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def look_figure(model: nn.Module, images: Sequence[Tensor], titles: Sequence[str]) -> "Figure":
    """Plot decays, mask and attention of the first and the last grid, with a row for each image (3, height, width)."""
    names = ("decay α", "decay β", "mask of the query", "attention of the query", "last full attention")
    figure = style.new_figure(12, 2.1 * len(images))
    axes = figure.subplots(len(images), 1 + len(names), squeeze=False)
    for row, image, title in zip(axes, images, titles, strict=True):
        records = capture_image(model, image)
        first, last = records[0], next(record for record in reversed(records) if min(record.grid) >= 4)
        query, last_query = _brightest(image, first.grid), _brightest(image, last.grid)
        panels = query_panels(first, query)
        values = [
            (panels.alpha, None),
            (panels.beta, None),
            (panels.mask, query),
            (panels.masked_attention, query),
            (query_panels(last, last_query).masked_attention, last_query),
        ]
        row[0].imshow(image.mean(0).numpy(), cmap="gray")
        style.hide_ticks(row[0], title, size=8)
        for axis, (panel, marked), name in zip(row[1:], values, names, strict=True):
            inside = panel[~panel.isnan()]
            limits = (inside.min().item(), inside.max().item())
            style.heatmap(axis, panel, "", limits=limits, query=marked)
            axis.set_title(name, fontsize=8)
    return figure


def _brightest(image: Tensor, grid: tuple[int, int]) -> tuple[int, int]:
    """The (row, column) of the token with the brightest pixels."""
    token = int(nn.functional.adaptive_avg_pool2d(image.mean(0)[None], grid).argmax())
    return token // grid[1], token % grid[1]

"""The structured masks of the paper's ablation for one query."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppma import masks
from ppma.explore import style
from ppma.explore.query import RMT_SPAN, check_query

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTH, EDGE = -0.05, -1.5  # log-decays within a region and across the strongest edge


def edge_decays(image: Tensor) -> tuple[Tensor, Tensor]:
    """Log-decays set by a rule, not learned: near 0 in smooth regions, strongly negative across edges.

    For illustrations of what a mask does with good decays.

    Args:
        image: (channels, H, W), one pixel per token.

    Returns:
        log_alpha and log_beta, (H, W) each.
    """
    across, down = (torch.zeros(image.shape[1:]) for _ in range(2))
    across[:, 1:] = (image[:, :, 1:] - image[:, :, :-1]).abs().mean(0)
    down[1:, :] = (image[:, 1:] - image[:, :-1]).abs().mean(0)
    strongest = max(across.max().item(), down.max().item(), 1e-12)
    # Squaring suppresses texture relative to edges.
    log_alpha, log_beta = (SMOOTH + (EDGE - SMOOTH) * (steps / strongest) ** 2 for steps in (across, down))
    return log_alpha, log_beta


def disc(side: int, radius: float = 0.32) -> Tensor:
    """A binary image of a disc, (1, side, side)."""
    axis = (torch.arange(side) + 0.5) / side - 0.5
    return ((axis[:, None] ** 2 + axis[None, :] ** 2) < radius**2).float()[None]


def masks_of_query(log_alpha: Tensor, log_beta: Tensor, query: tuple[int, int]) -> dict[str, Tensor]:
    """Each structured mask's weights for one query, scaled to 1 at the query itself.

    Args:
        log_alpha: (H, W).
        log_beta: (H, W).
        query: (i, j).

    Returns:
        name -> (H, W).
    """
    H, W = log_alpha.shape
    check_query(query, (H, W))
    built = {
        "no mask": masks.none((H, W)),
        "RMT decay": masks.rmt(masks.rmt_log_decay(2, RMT_SPAN)[1:], (H, W)),
        "cross scan": masks.cross(log_alpha, log_beta),
        "Hilbert scan": masks.hilbert(log_alpha, log_beta),
        "V2H polyline": masks.v2h(log_alpha, log_beta),
        "2D polyline": masks.polyline_2d(log_alpha, log_beta),
    }
    token = query[0] * W + query[1]
    return {name: mask.dense().exp().mean(0).view(H * W, H * W)[token].view(H, W) for name, mask in built.items()}


def mask_gallery(log_alpha: Tensor, log_beta: Tensor, query: tuple[int, int], *, width: float = style.PAGE) -> "Figure":
    """Draw the structured masks of the ablation for one query on one colour scale.

    Args:
        log_alpha: (H, W).
        log_beta: (H, W).
        query: (i, j).
        width: of the figure, in inches.
    """
    panels = masks_of_query(log_alpha, log_beta, query)
    columns = style.columns_of(len(panels), width)
    rows = len(panels) // columns
    figure = style.new_figure(width, rows * (width / columns + 0.1))
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (name, values) in zip(axes, panels.items(), strict=True):
        image = style.heatmap(axis, values, name, query=query)
    style.colour_bar(figure, image, axes, "weight of the key", aspect=18 * rows)
    return figure

"""The structured masks of the paper's ablation side by side, for one query."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppma import masks
from ppma.explore import style
from ppma.explore.query import RMT_SPAN, check_query

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CALM, EDGE = -0.05, -1.5  # log-decays inside a region, and across the strongest edge


def edge_decays(image: Tensor) -> tuple[Tensor, Tensor]:
    """Log-decays such as a model might learn: near 1 where neighbouring tokens are alike, small across an edge.

    Set by a rule and not learned; for pictures that explain.

    Args:
        image: (channels, H, W), one pixel for each token.

    Returns:
        log_alpha and log_beta, (H, W) each.
    """
    across, down = (torch.zeros(image.shape[1:]) for _ in range(2))
    across[:, 1:] = (image[:, :, 1:] - image[:, :, :-1]).abs().mean(0)
    down[1:, :] = (image[:, 1:] - image[:, :-1]).abs().mean(0)
    strongest = max(across.max().item(), down.max().item(), 1e-12)
    # Squared, so that texture counts for little beside an edge.
    log_alpha, log_beta = (CALM + (EDGE - CALM) * (steps / strongest) ** 2 for steps in (across, down))
    return log_alpha, log_beta


def disc(side: int, radius: float = 0.32) -> Tensor:
    """The image of a disc, (1, side, side), 1 inside and 0 outside."""
    axis = (torch.arange(side) + 0.5) / side - 0.5
    return ((axis[:, None] ** 2 + axis[None, :] ** 2) < radius**2).float()[None]


def masks_of_query(log_alpha: Tensor, log_beta: Tensor, query: tuple[int, int]) -> dict[str, Tensor]:
    """What each structured mask gives the keys of one query, scaled so that the query itself has 1.

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


def mask_gallery(log_alpha: Tensor, log_beta: Tensor, query: tuple[int, int]) -> "Figure":
    """The structured masks of the ablation for one query, on one colour scale.

    Args:
        log_alpha: (H, W).
        log_beta: (H, W).
        query: (i, j).
    """
    panels = masks_of_query(log_alpha, log_beta, query)
    figure = style.new_figure(2.1 * len(panels), 2.5)
    axes = figure.subplots(1, len(panels))
    for axis, (name, values) in zip(axes, panels.items(), strict=True):
        image = style.heat(axis, values, name, query=query)
    figure.colorbar(image, ax=axes, shrink=0.8, label="weight of the key")
    return figure

"""Figures of masks (matplotlib, in the `explore` extra)."""

from typing import TYPE_CHECKING

import torch

from ppma import masks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def edge_decays(side: int, radius: float = 0.32) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-decays that a model might learn on an image of a disc: near 1 inside and outside, small across its edge.

    Returns:
        log_alpha and log_beta, (side, side) each.
    """
    axis = (torch.arange(side) + 0.5) / side - 0.5
    disc = ((axis[:, None] ** 2 + axis[None, :] ** 2) < radius**2).float()
    calm, edge = -0.05, -1.5
    log_alpha = calm + (edge - calm) * (disc - disc.roll(1, 1)).abs()
    log_beta = calm + (edge - calm) * (disc - disc.roll(1, 0)).abs()
    return log_alpha, log_beta


def masks_of_query(log_alpha: torch.Tensor, log_beta: torch.Tensor, query: tuple[int, int]) -> dict[str, torch.Tensor]:
    """What each structured mask gives the keys of one query, scaled so that the query itself has 1.

    Args:
        log_alpha: (H, W).
        log_beta: (H, W).
        query: (i, j).

    Returns:
        name -> (H, W).
    """
    H, W = log_alpha.shape
    built = {
        "no mask": masks.none((H, W)),
        "RMT decay": masks.rmt(masks.rmt_log_decay(2, 4)[1:], (H, W)),
        "cross scan": masks.cross(log_alpha, log_beta),
        "Hilbert scan": masks.hilbert(log_alpha, log_beta),
        "V2H polyline": masks.v2h(log_alpha, log_beta),
        "2D polyline": masks.polyline(log_alpha, log_beta),
    }
    token = query[0] * W + query[1]
    return {name: mask.dense().exp().mean(0).view(H * W, H * W)[token].view(H, W) for name, mask in built.items()}


def mask_gallery(side: int = 24, query: tuple[int, int] = (9, 8)) -> "Figure":
    """The structured masks of the ablation for one query on the image of a disc, on one colour scale."""
    from matplotlib.figure import Figure

    panels = masks_of_query(*edge_decays(side), query)
    figure = Figure(figsize=(2.1 * len(panels), 2.5), layout="constrained")
    axes = figure.subplots(1, len(panels))
    for axis, (name, values) in zip(axes, panels.items(), strict=True):
        image = axis.imshow(values, vmin=0, vmax=1, cmap="viridis")
        axis.add_patch(_box(query))
        axis.set_title(name, fontsize=10)
        axis.set_xticks([])
        axis.set_yticks([])
    figure.colorbar(image, ax=axes, shrink=0.8, label="weight of the key")
    return figure


def _box(token: tuple[int, int]):  # type: ignore[no-untyped-def]
    from matplotlib.patches import Rectangle

    return Rectangle((token[1] - 0.5, token[0] - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=1.5)

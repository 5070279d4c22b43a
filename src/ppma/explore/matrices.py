"""The decomposition of the V2H mask into a row and a column factor (Theorem 1), as matrices."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppma.explore import style
from ppma.ops.decay_matrix import log_decay_matrix

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def mask_factors(log_alpha: Tensor, log_beta: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of L = LH LV: LH couples tokens of one row, LV tokens of one column.

    Args:
        log_alpha: (H, W).
        log_beta: (H, W).

    Returns:
        LH and LV, (H*W, H*W) each, over the tokens in raster order; entries between other tokens are 0.

    Examples:
        >>> import torch, ppma
        >>> from ppma.explore.matrices import mask_factors
        >>> log_alpha, log_beta = -torch.rand(2, 3, 4)
        >>> horizontal, vertical = mask_factors(log_alpha, log_beta)
        >>> mask = ppma.polyline_mask(log_alpha, log_beta, paths="v2h")
        >>> torch.allclose(horizontal @ vertical, mask)
        True
    """
    H, W = log_alpha.shape
    rows = log_decay_matrix(log_alpha, dim=-1).exp().to(log_alpha.dtype)  # [i, j, l]
    columns = log_decay_matrix(log_beta, dim=-2).exp().to(log_beta.dtype)  # [i, k, l]
    same_row, same_column = torch.eye(H, dtype=rows.dtype), torch.eye(W, dtype=rows.dtype)
    horizontal = torch.einsum("ijl,ik->ijkl", rows, same_row)
    vertical = torch.einsum("ikl,jl->ijkl", columns, same_column)
    return horizontal.reshape(H * W, H * W), vertical.reshape(H * W, H * W)


def factors_figure(log_alpha: Tensor, log_beta: Tensor) -> "Figure":
    """Draw L = LH × LV as matrices over the tokens in raster order; zeros are grey, lines separate the grid's rows.

    Args:
        log_alpha: (H, W).
        log_beta: (H, W).
    """
    width = log_alpha.shape[1]
    horizontal, vertical = mask_factors(log_alpha, log_beta)
    panels = {"L": horizontal @ vertical, "= LH: rows": horizontal, "× LV: columns": vertical}
    figure = style.new_figure(style.PAGE, 2.3)
    axes = figure.subplots(1, len(panels))
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        drawn = style.heatmap(axis, values.where(values > 0, torch.nan), title)
        for edge in range(width, len(values), width):
            axis.axhline(edge - 0.5, color="w", linewidth=0.6)
            axis.axvline(edge - 0.5, color="w", linewidth=0.8)
        axis.set_xlabel("key", fontsize=style.FONT)
    axes[0].set_ylabel("query", fontsize=style.FONT)
    style.colour_bar(figure, drawn, axes)
    return figure

"""The polyline path mask as a matrix, by the decomposition of Theorem 1: O(N^2) instead of O(N^2.5)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ppma.ops import checks
from ppma.ops.decay_matrix import log_decay_matrix, log_sum
from ppma.ops.options import ND_PATHS, NdPaths, Paths


def polyline_mask(log_alpha: Tensor, log_beta: Tensor, *, paths: Paths = "2d", log: bool = False) -> Tensor:
    """The polyline path mask of an H x W grid as a matrix over its tokens in raster order (Eqs. 3-5).

    `alpha[i, j]` is the decay of the horizontal edge between columns j-1 and j of row i, `beta[i, j]` of the vertical
    edge between rows i-1 and i of column j; `alpha[:, 0]` and `beta[0, :]` lie outside the grid and are never read.

    Args:
        log_alpha: (..., H, W) float32 or float64, <= 0; -inf is a decay of 0.
        log_beta: (..., H, W), same dtype.
        paths: "v2h" (from the key along its column, then along the query's row), "h2v" (its transpose) or "2d"
            (their sum, so the diagonal is 2).
        log: return the logarithm of the mask.

    Returns:
        (..., H*W, H*W): entry [query, key], in the dtype of the log-decays.

    Examples:
        >>> import torch, ppma
        >>> half = torch.full((2, 2), 0.5).log()
        >>> ppma.polyline_mask(half, half, paths="v2h")[0]
        tensor([1.0000, 0.5000, 0.5000, 0.2500])
    """
    checks.one_of("paths", paths, ND_PATHS)
    log_beta, log_alpha = checks.log_decays({"log_beta": log_beta, "log_alpha": log_alpha}, axes=2)
    return _mask([log_beta, log_alpha], ND_PATHS[paths], log)


def polyline_mask_nd(log_decays: Sequence[Tensor], *, paths: NdPaths = "both", log: bool = False) -> Tensor:
    """The polyline path mask of a grid with any number of axes, as a matrix over its tokens in raster order.

    Args:
        log_decays: one (..., *grid) tensor for each grid axis, in axis order; entry [..., p] of tensor a belongs to
            the edge before token p along axis a.
        paths: "forward" walks from the key along the first axis first, "reverse" along the last axis first, "both" is
            their sum. In 2D, "forward" with `[log_beta, log_alpha]` is V2H.
        log: return the logarithm of the mask.

    Returns:
        (..., N, N): entry [query, key], in the dtype of the log-decays.

    Examples:
        >>> import torch, ppma
        >>> line = torch.tensor([0.0, 0.5, 0.5]).log()
        >>> ppma.polyline_mask_nd([line], paths="forward")
        tensor([[1.0000, 0.5000, 0.2500],
                [0.5000, 1.0000, 0.5000],
                [0.2500, 0.5000, 1.0000]])
    """
    checks.one_of("paths", paths, ("forward", "reverse", "both"))
    named = checks.decay_sequence(log_decays)
    return _mask(checks.log_decays(named, axes=len(named)), paths, log)


def _mask(log_decays: list[Tensor], paths: NdPaths, log: bool) -> Tensor:
    axes = len(log_decays)
    grid = log_decays[0].shape[-axes:]
    batch = log_decays[0].shape[:-axes]
    factors = []
    for axis, log_decay in enumerate(log_decays):
        # Walking the axes in order, axis a is walked at the query's position on the axes before it and at the key's
        # position on those after it: its matrix has the axes p_0 .. p_a, q_a .. q_last of the mask.
        lines = log_decay_matrix(log_decay, dim=axis - axes)
        shape = (*batch, *grid[: axis + 1], *[1] * (axes - 1), *grid[axis:])
        factor = lines if log else lines.exp()
        factors.append(factor.reshape(shape).to(log_decay.dtype))
    mask = factors[0]
    for factor in factors[1:]:
        mask = mask + factor if log else mask * factor
    n = 1
    for extent in grid:
        n = n * extent
    forward = mask.reshape(*batch, n, n)
    if paths == "forward":
        return forward
    if paths == "reverse":
        return forward.mT
    return log_sum(forward, forward.mT) if log else forward + forward.mT


def algorithm1(x: Tensor, log_alpha: Tensor, log_beta: Tensor) -> Tensor:
    """Algorithm 1: the V2H mask times x by one matrix product per column, then one per row, O(N^1.5).

    For comparison with the paper and with `polyline_scan`, which takes O(N).

    Args:
        x: (..., H, W, C).
        log_alpha: (..., H, W).
        log_beta: (..., H, W).

    Returns:
        (..., H, W, C).
    """
    columns = log_decay_matrix(log_beta, dim=-2).exp().to(x.dtype)  # [i, k, l]
    z = torch.einsum("...ikl,...klc->...ilc", columns, x)
    rows = log_decay_matrix(log_alpha, dim=-1).exp().to(x.dtype)  # [i, j, l]
    return torch.einsum("...ijl,...ilc->...ijc", rows, z)

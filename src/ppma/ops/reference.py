"""The oracle: every definition of the paper, written as it is printed, in float64.

Slow on purpose. An entry of a mask is a product over the edges of a path; attentions are dense matrix products.
Everything is differentiable by autograd, and everything fast is tested against it. Numbers in parentheses are the
paper's equations; indices are 0-based.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ppma.ops.decay_matrix import log_sum
from ppma.ops.options import Combine, NdPaths, Paths
from ppma.ops.padding import mask_invalid, softmax, zero_invalid


def edges_between(decay: Tensor, a: int, b: int) -> Tensor:
    """The decays on the edges between positions a and b of the last axis: (..., |a - b|)."""
    return decay[..., min(a, b) + 1 : max(a, b) + 1]


def path_v2h(row: Tensor, column: Tensor, query: tuple[int, int], key: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Eq. (3): the decays on the V2H path from the key, along its column, then along the query's row.

    Args:
        row: (..., H, W), one value for each horizontal edge (alpha or log alpha).
        column: (..., H, W), one value for each vertical edge (beta or log beta).
        query: (i, j).
        key: (k, l).

    Returns:
        (..., |j - l|) and (..., |i - k|).
    """
    (i, j), (k, l) = query, key
    return edges_between(row[..., i, :], j, l), edges_between(column[..., :, l], i, k)


def path_h2v(row: Tensor, column: Tensor, query: tuple[int, int], key: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The decays on the H2V path: along the key's row, then along the query's column.

    The paper prints `alpha_{k,j:l} beta_{i:k,l}` here. Only `beta_{i:k,j}` makes H2V the transpose of V2H, which
    the paper states in the next sentence and uses everywhere.
    """
    return path_v2h(row, column, key, query)


PATHS = {"v2h": (path_v2h,), "h2v": (path_h2v,), "2d": (path_v2h, path_h2v)}


def tokens(height: int, width: int) -> list[tuple[int, int]]:
    """The grid's tokens in raster order."""
    return list(product(range(height), range(width)))


def _unfold(entry_rows: list[list[Tensor]]) -> Tensor:
    return torch.stack([torch.stack(row, -1) for row in entry_rows], -2)


def _log_path_mask(path, log_alpha: Tensor, log_beta: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    grid = tokens(*log_alpha.shape[-2:])

    def entry(u: tuple[int, int], v: tuple[int, int]) -> Tensor:
        row, column = path(log_alpha, log_beta, u, v)
        return row.sum(-1) + column.sum(-1)

    return _unfold([[entry(u, v) for v in grid] for u in grid])


def _path_mask(path, alpha: Tensor, beta: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    grid = tokens(*alpha.shape[-2:])

    def entry(u: tuple[int, int], v: tuple[int, int]) -> Tensor:
        row, column = path(alpha, beta, u, v)
        return row.prod(-1) * column.prod(-1)

    return _unfold([[entry(u, v) for v in grid] for u in grid])


def polyline_mask(log_alpha: Tensor, log_beta: Tensor, *, paths: Paths = "2d", log: bool = False) -> Tensor:
    """Eqs. (3)-(5): the O(N^2.5) construction, each entry a product along its own path.

    Args:
        log_alpha: (..., H, W).
        log_beta: (..., H, W).
        paths: "v2h", "h2v" or "2d" (their sum).
        log: return the logarithm.

    Returns:
        (..., H*W, H*W), float64.
    """
    log_alpha, log_beta = log_alpha.double(), log_beta.double()
    if log:
        masks = [_log_path_mask(path, log_alpha, log_beta) for path in PATHS[paths]]
        return masks[0] if len(masks) == 1 else log_sum(masks[0], masks[1])
    return torch.stack([_path_mask(path, log_alpha.exp(), log_beta.exp()) for path in PATHS[paths]]).sum(0)


def polyline_mask_nd(log_decays: Sequence[Tensor], *, paths: NdPaths = "both", log: bool = False) -> Tensor:
    """The mask on a grid of any number of axes: a path walks one axis after the other.

    Args:
        log_decays: one (..., *grid) tensor for each grid axis, in axis order.
        paths: "forward" walks from the key along the first axis first, "reverse" along the last axis first,
            "both" is their sum.
        log: return the logarithm.

    Returns:
        (..., N, N), float64.
    """
    axes = len(log_decays)
    log_decays = [decay.double() for decay in log_decays]
    grid = list(product(*(range(n) for n in log_decays[0].shape[-axes:])))

    def edges(key: tuple[int, ...], query: tuple[int, ...]) -> list[Tensor]:
        position, walked = list(key), []
        for axis in range(axes):
            line: tuple[Any, ...] = (..., *position[:axis], slice(None), *position[axis + 1 :])
            walked.append(edges_between(log_decays[axis][line], position[axis], query[axis]))
            position[axis] = query[axis]
        return walked

    def entry(walked: list[Tensor]) -> Tensor:
        return torch.cat(walked, -1).sum(-1) if log else torch.cat(walked, -1).exp().prod(-1)

    forward = _unfold([[entry(edges(key, query)) for key in grid] for query in grid])
    if paths == "forward":
        return forward
    reverse = forward.mT
    if paths == "reverse":
        return reverse
    return log_sum(forward, reverse) if log else forward + reverse


def line_matrix(decay: Tensor) -> Tensor:
    """A^i and B^l: (..., n) -> (..., n, n), the decay products between all positions of a line."""
    n = decay.shape[-1]
    return _unfold([[edges_between(decay, a, b).prod(-1) for b in range(n)] for a in range(n)])


def horizontal_matrix(blocks: Tensor, *, hat: bool = False) -> Tensor:
    """Theorem 1: M^A (Eq. 7) from the row blocks A^i, or its broadcast form M-hat^A (Eq. 8).

    Args:
        blocks: (..., H, W, W), block i acts within row i.
        hat: repeat block i over all key rows instead of keeping it on the diagonal.

    Returns:
        (..., H*W, H*W).
    """
    *batch, H, W, _ = blocks.shape
    tensor = blocks[..., :, :, None, :].expand(*batch, H, W, H, W)
    if not hat:
        tensor = tensor * torch.eye(H, dtype=blocks.dtype)[:, None, :, None]
    return tensor.reshape(*batch, H * W, H * W)


def vertical_matrix(blocks: Tensor, *, hat: bool = False) -> Tensor:
    """Theorem 1: M^B (Eq. 7) from the column blocks B^l, or its broadcast form M-hat^B (Eq. 8).

    Args:
        blocks: (..., W, H, H), block l acts within column l.
        hat: repeat block l over all query columns instead of keeping it on the diagonal.

    Returns:
        (..., H*W, H*W).
    """
    *batch, W, H, _ = blocks.shape
    tensor = blocks.movedim(-3, -1)[..., :, None, :, :].expand(*batch, H, W, H, W)
    if not hat:
        tensor = tensor * torch.eye(W, dtype=blocks.dtype)[None, :, None, :]
    return tensor.reshape(*batch, H * W, H * W)


def algorithm1(x: Tensor, log_alpha: Tensor, log_beta: Tensor) -> Tensor:
    """Algorithm 1, O(N^1.5): L x by one matrix product per column, then one per row.

    Args:
        x: (..., H, W, C).
        log_alpha: (..., H, W).
        log_beta: (..., H, W).

    Returns:
        (..., H, W, C), float64.
    """
    B = line_matrix(log_beta.double().exp().mT)
    Z = torch.einsum("...lik,...klc->...ilc", B, x.double())
    A = line_matrix(log_alpha.double().exp())
    return torch.einsum("...ijl,...ilc->...ijc", A, Z)


def polyline_scan(x: Tensor, log_alpha: Tensor, log_beta: Tensor, *, paths: Paths = "2d") -> Tensor:
    """The dense mask times x: (..., H, W, C) -> (..., H, W, C)."""
    mask = polyline_mask(log_alpha, log_beta, paths=paths)
    return (mask @ x.double().flatten(-3, -2)).unflatten(-2, x.shape[-3:-1]).to(x.dtype)


def polyline_scan_nd(x: Tensor, log_decays: Sequence[Tensor], *, paths: NdPaths = "both") -> Tensor:
    """The dense n-D mask times x: (..., *grid, C) -> (..., *grid, C)."""
    axes = len(log_decays)
    mask = polyline_mask_nd(log_decays, paths=paths)
    grid = x.shape[-1 - axes : -1]
    return (mask @ x.double().flatten(-1 - axes, -2)).unflatten(-2, grid).to(x.dtype)


def _flat(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double().flatten(-3, -2) for tensor in tensors]


def _masked_scores(q: Tensor, k: Tensor, scale: float, valid: Tensor | None) -> Tensor:
    """`q k^T`, (..., N, N), with -inf for invalid keys."""
    flat_q, flat_k = _flat(q, zero_invalid(k, valid))
    return mask_invalid(flat_q @ flat_k.mT * scale, None if valid is None else valid.flatten(-2)[..., None, :])


def polyline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    *,
    combine: Combine = "hadamard",
    paths: Paths = "2d",
    scale: float,
    valid: Tensor | None = None,
) -> Tensor:
    """Eq. (10): `(softmax(q k^T) * L) v`, or `softmax(q k^T + log L) v` averaged over the paths.

    `valid`, (..., H, W) with the batch axes of q but the heads, leaves its False tokens out as keys.
    """
    scores = _masked_scores(q, k, scale, valid)
    (flat_v,), padded = _flat(zero_invalid(v, valid)), valid is not None
    if combine == "hadamard":
        out = (softmax(scores, padded) * polyline_mask(log_alpha, log_beta, paths=paths)) @ flat_v
    else:
        log_masks = [_log_path_mask(path, log_alpha.double(), log_beta.double()) for path in PATHS[paths]]
        out = torch.stack([softmax(scores + log_mask, padded) @ flat_v for log_mask in log_masks]).mean(0)
    return out.unflatten(-2, q.shape[-3:-1]).to(v.dtype)


def criss_cross_maps(
    q: Tensor,
    k: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    *,
    combine: Combine,
    scale: float,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The masked maps within rows and within columns, as (..., N, N) matrices with zeros elsewhere.

    `SH * LH` and `SV * LV` of Eq. (12) for "hadamard"; one softmax over score plus log mask for "logit".
    """
    H, W = q.shape[-3:-1]
    scores, padded = _masked_scores(q, k, scale, valid), valid is not None
    row, column = torch.tensor(tokens(H, W)).unbind(-1)
    log_mask = _log_path_mask(path_v2h, log_alpha.double(), log_beta.double())
    maps = []
    for line in (row, column):
        elsewhere = line[:, None] != line[None, :]
        if combine == "hadamard":
            mask = _path_mask(path_v2h, log_alpha.double().exp(), log_beta.double().exp())
            maps.append(softmax(scores.masked_fill(elsewhere, -torch.inf), padded) * mask)
        else:
            maps.append(softmax((scores + log_mask).masked_fill(elsewhere, -torch.inf), padded))
    return maps[0], maps[1]


def criss_cross_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    *,
    combine: Combine = "hadamard",
    paths: Paths = "2d",
    scale: float,
    valid: Tensor | None = None,
) -> Tensor:
    """Eqs. (11), (12): V2H `(SH*LH)((SV*LV) v)`, H2V `(SV*LV)((SH*LH) v)`; summed, averaged for "logit".

    `valid` as in `polyline_attention`; the inner attention leaves invalid keys out, and so does the outer one.
    """
    rows, columns = criss_cross_maps(q, k, log_alpha, log_beta, combine=combine, scale=scale, valid=valid)
    (flat_v,) = _flat(zero_invalid(v, valid))
    chains = {"v2h": [rows @ (columns @ flat_v)], "h2v": [columns @ (rows @ flat_v)]}
    chains["2d"] = chains["v2h"] + chains["h2v"]
    total = torch.stack(chains[paths])
    out = total.sum(0) if combine == "hadamard" else total.mean(0)
    return out.unflatten(-2, q.shape[-3:-1]).to(v.dtype)


def criss_cross_attention_as_printed(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, *, scale: float
) -> Tensor:
    """Eq. (11) to the letter: `((SH SV) * L + (SH SV) * Lt) v`.

    Its second half does not factorise into two line attentions (Lt needs `SV SH`), so it cannot be computed in
    O(N^1.5). Only a test uses it, to show the difference.
    """
    no_decay = torch.zeros_like(log_alpha), torch.zeros_like(log_beta)
    rows, columns = criss_cross_maps(q, k, *no_decay, combine="hadamard", scale=scale)
    (flat_v,) = _flat(v)
    out = ((rows @ columns) * polyline_mask(log_alpha, log_beta)) @ flat_v
    return out.unflatten(-2, q.shape[-3:-1]).to(v.dtype)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, *, paths: Paths = "2d"
) -> Tensor:
    """Linear and decomposed attention: `((q k^T) * L) v`, no softmax and no scale."""
    flat_q, flat_k, flat_v = _flat(q, k, v)
    out = ((flat_q @ flat_k.mT) * polyline_mask(log_alpha, log_beta, paths=paths)) @ flat_v
    return out.unflatten(-2, q.shape[-3:-1]).to(v.dtype)

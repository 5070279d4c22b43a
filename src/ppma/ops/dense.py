"""The operators as plain tensor functions: dense, without loops, differentiable any number of times.

They replace the operators for exporters without custom operators (`ppma.ops.decompositions`) and give forward-mode and
higher derivatives (`ppma.ops.torch_ops`). Sizes may be symbolic; memory is O(N^2) for full and
linear attention, O(N^1.5) for criss-cross attention and scans.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ppma.ops.decay_matrix import log_decay_matrix
from ppma.ops.layout import compute_dtype
from ppma.ops.mask import polyline_mask
from ppma.ops.options import AttentionOptions, Combine, NdPaths, Paths, axis_orders, split_paths
from ppma.ops.padding import mask_invalid, softmax, zero_invalid


def polyline_scan(x: Tensor, log_decays: Sequence[Tensor], paths: NdPaths) -> Tensor:
    """`x` (B, heads, *grid, C), log_decays (B, heads, *grid) each -> like x."""
    axes, dtype = len(log_decays), compute_dtype(x.dtype)
    matrices = [log_decay_matrix(decay, axis - axes).exp().to(dtype) for axis, decay in enumerate(log_decays)]
    letters = "hijklmno"[:axes]
    total = torch.zeros((), dtype=dtype, device=x.device)
    for order in axis_orders(paths, axes):
        values = x.to(dtype)
        for axis in order:
            line = letters[axis]
            outputs = letters.replace(line, "q")
            matrix = letters.replace(line, f"q{line}")
            values = torch.einsum(f"...{matrix},...{letters}z->...{outputs}z", matrices[axis], values)
        total = total + values
    return total.to(x.dtype)


def polyline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    options: AttentionOptions,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All outputs of the operator: output, statistics of the softmaxes, output of the first of two softmaxes."""
    combine, paths, scale, _ = options
    dtype, grid = compute_dtype(q.dtype), q.shape[2:4]
    k, v, padded = zero_invalid(k, valid), zero_invalid(v, valid), valid is not None
    flat_q, flat_k, flat_v = (tensor.flatten(2, 3).to(dtype) for tensor in (q, k, v))
    scores = mask_invalid(flat_q @ flat_k.mT * scale, None if valid is None else valid.flatten(1)[:, None])
    if combine == "hadamard":
        logits = [scores]
        outs = [(softmax(scores, padded) * polyline_mask(log_alpha, log_beta, paths=paths).to(dtype)) @ flat_v]
    else:
        log_masks = [polyline_mask(log_alpha, log_beta, paths=path, log=True) for path in split_paths(paths)]
        logits = [scores + log_mask.to(dtype) for log_mask in log_masks]
        outs = [softmax(logit, padded) @ flat_v for logit in logits]
    out = torch.stack(outs).mean(0) if len(outs) > 1 else outs[0]
    stats = []
    for logit in logits:
        top = logit.amax(-1)
        stats += [top, (logit - top[..., None]).exp().sum(-1)]
    first = torch.stack(outs)[: len(outs) - 1].unflatten(-2, grid)
    return out.unflatten(-2, grid).to(v.dtype), torch.stack(stats).unflatten(-1, grid), first


def criss_cross_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    options: AttentionOptions,
    valid: Tensor | None = None,
) -> Tensor:
    """q, k (B, heads, H, W, d), v (B, heads, H, W, dv), log-decays (B, heads, H, W) -> (B, heads, H, W, dv)."""
    combine, paths, scale, _ = options
    dtype = compute_dtype(q.dtype)
    row_q, row_k, row_v = (tensor.to(dtype) for tensor in (q, zero_invalid(k, valid), zero_invalid(v, valid)))
    row_map = _line_map(row_q, row_k, log_alpha, combine, scale, valid)
    valid_columns = None if valid is None else valid.mT
    column_map = _line_map(_columns(row_q), _columns(row_k), log_beta.mT, combine, scale, valid_columns)
    outs = [
        row_map @ _columns(column_map @ _columns(row_v))
        if path == "v2h"
        else _columns(column_map @ _columns(row_map @ row_v))
        for path in split_paths(paths)
    ]
    total = outs[0] if len(outs) == 1 else outs[0] + outs[1]
    return (total * options.path_weight).to(v.dtype)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, paths: Paths) -> Tensor:
    """q, k (B, heads, H, W, d), v (B, heads, H, W, dv), log-decays (B, heads, H, W) -> (B, heads, H, W, dv)."""
    dtype = compute_dtype(q.dtype)
    flat_q, flat_k, flat_v = (tensor.flatten(2, 3).to(dtype) for tensor in (q, k, v))
    out = (flat_q @ flat_k.mT * polyline_mask(log_alpha, log_beta, paths=paths).to(dtype)) @ flat_v
    return out.unflatten(-2, q.shape[2:4]).to(v.dtype)


def _columns(x: Tensor) -> Tensor:
    return x.transpose(2, 3)


def _line_map(q: Tensor, k: Tensor, log_decay: Tensor, combine: Combine, scale: float, valid: Tensor | None) -> Tensor:
    scores = mask_invalid(q @ k.mT * scale, None if valid is None else valid[:, None])
    log_mask = log_decay_matrix(log_decay)
    if combine == "logit":
        return softmax(scores + log_mask.to(q.dtype), padded=valid is not None)
    return softmax(scores, padded=valid is not None) * log_mask.exp().to(q.dtype)

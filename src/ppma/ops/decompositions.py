"""The attention operators as plain tensor functions, for exporters that know no custom operators.

`ExportedProgram.run_decompositions(table())` replaces the operators in a captured graph. These are the dense forms,
without loops, so they hold for symbolic sizes; memory is O(N^2) for full attention.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ppma.ops import library  # noqa: F401  (defines torch.ops.ppma)
from ppma.ops.layout import compute_dtype, split_paths
from ppma.ops.lines import log_decay_matrix
from ppma.ops.mask import polyline_mask


def _heads_last(out: Tensor) -> Tensor:
    """The memory layout that the operators promise."""
    return out.movedim(1, -2).contiguous().movedim(-2, 1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    combine: str,
    paths: str,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`torch.ops.ppma.attention`."""
    dtype, grid = compute_dtype(q.dtype), q.shape[2:4]
    flat_q, flat_k, flat_v = (tensor.flatten(2, 3).to(dtype) for tensor in (q, k, v))
    scores = flat_q @ flat_k.mT * scale
    if combine == "hadamard":
        stats = _softmax_stats(scores)
        outs = [(scores.softmax(-1) * polyline_mask(log_alpha, log_beta, paths=paths).to(dtype)) @ flat_v]
    else:
        log_masks = [polyline_mask(log_alpha, log_beta, paths=path, log=True) for path in split_paths(paths)]
        logits = [scores + log_mask.to(dtype) for log_mask in log_masks]
        stats = [part for logit in logits for part in _softmax_stats(logit)]
        outs = [logit.softmax(-1) @ flat_v for logit in logits]
    out = torch.stack(outs).mean(0) if len(outs) > 1 else outs[0]
    first = torch.stack(outs)[: len(outs) - 1].unflatten(-2, grid)
    return _heads_last(out.unflatten(-2, grid).to(v.dtype)), torch.stack(stats).unflatten(-1, grid), first


def _softmax_stats(logits: Tensor) -> list[Tensor]:
    """What the operator keeps of a softmax: maxima and sums."""
    top = logits.amax(-1, keepdim=True)
    return [top.squeeze(-1), (logits - top).exp().sum(-1)]


def criss_cross(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    combine: str,
    paths: str,
    scale: float,
    backend: str,
) -> Tensor:
    """`torch.ops.ppma.criss_cross`."""
    dtype = compute_dtype(q.dtype)
    row_q, row_k, row_v = (tensor.to(dtype) for tensor in (q, k, v))
    row_map = _line_map(row_q, row_k, log_alpha, combine, scale)
    column_map = _line_map(_columns(row_q), _columns(row_k), log_beta.mT, combine, scale)
    outs = [
        row_map @ _columns(column_map @ _columns(row_v))
        if path == "v2h"
        else _columns(column_map @ _columns(row_map @ row_v))
        for path in split_paths(paths)
    ]
    total = outs[0] if len(outs) == 1 else outs[0] + outs[1]
    if combine == "logit" and len(outs) > 1:
        total = total / 2
    return _heads_last(total.to(v.dtype))


def _columns(x: Tensor) -> Tensor:
    return x.transpose(2, 3)


def _line_map(q: Tensor, k: Tensor, log_decay: Tensor, combine: str, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    log_mask = log_decay_matrix(log_decay)
    if combine == "logit":
        return (scores + log_mask.to(q.dtype)).softmax(-1)
    return scores.softmax(-1) * log_mask.exp().to(q.dtype)


def table() -> dict[Any, Callable[..., Any]]:
    """Operators that a model's forward pass may contain, and what they are made of."""
    return {
        torch.ops.ppma.attention.default: attention,
        torch.ops.ppma.criss_cross.default: criss_cross,
    }

"""Full attention with the mask: csrc/attention.cpp and csrc/attention_backward.cpp."""

from ctypes import POINTER, c_void_p

import torch
from torch import Tensor

from ppma.ops.backends.native.library import Kernel, View, contiguous_address
from ppma.ops.backends.native.params import AttentionParams, Gradients, unit_stride
from ppma.ops.layout import heads_last_empty
from ppma.ops.options import AttentionOptions

_forward = Kernel("ppma_polyline_attention", POINTER(AttentionParams), POINTER(View), c_void_p, c_void_p)
_backward = Kernel(
    "ppma_polyline_attention_backward", POINTER(AttentionParams), POINTER(Gradients), POINTER(View), c_void_p, c_void_p
)


def polyline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward; see `Backend.polyline_attention`."""
    params = AttentionParams(q, k, v, log_alpha, log_beta, options)
    out = heads_last_empty(v, v.shape[-1])
    stats_shape, first_shape = _saved_shapes(q, v, options)
    stats = torch.empty(stats_shape, dtype=torch.float32, device=q.device)
    first = torch.empty(first_shape, dtype=torch.float32, device=q.device)
    _forward(
        params, View.of(out, v.shape), contiguous_address(stats, stats_shape), contiguous_address(first, first_shape)
    )
    return out, stats, first


def _saved_shapes(q: Tensor, v: Tensor, options: AttentionOptions) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the softmaxes' maxima and sums, and of the output of the first of two."""
    return (2 * options.softmaxes, *q.shape[:-1]), (options.softmaxes - 1, *v.shape)


def polyline_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    out: Tensor,
    stats: Tensor,
    first: Tensor,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_alpha, log_beta; each tile is recomputed from the saved maxima and sums."""
    params = AttentionParams(q, k, v, log_alpha, log_beta, options)
    gradients = Gradients(grad, q, k, v)
    out, stats, first = unit_stride(out), stats.contiguous(), first.contiguous()
    stats_shape, first_shape = _saved_shapes(q, v, options)
    _backward(
        params,
        gradients,
        View.of(out, v.shape),
        contiguous_address(stats, stats_shape),
        contiguous_address(first, first_shape),
    )
    return gradients.results(log_alpha.dtype, log_beta.dtype)

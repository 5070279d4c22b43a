"""Full attention with the mask: csrc/attention.cpp and csrc/attention_backward.cpp."""

from ctypes import c_void_p

import torch
from torch import Tensor

from ppma.ops.backends.native.library import Kernel, contiguous_address, view
from ppma.ops.backends.native.params import AttentionParams, Gradients, unit_stride
from ppma.ops.layout import heads_last_empty
from ppma.ops.options import AttentionOptions

_forward = Kernel("ppma_polyline_attention", c_void_p, c_void_p, c_void_p, c_void_p)
_backward = Kernel("ppma_polyline_attention_backward", c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)


def polyline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    options: AttentionOptions,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward; see `Backend.polyline_attention`."""
    params = AttentionParams(q, k, v, log_alpha, log_beta, options, valid)
    out = heads_last_empty(v, v.shape[-1])
    shapes = _saved_shapes(q, v, options)
    stats, first = (torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes)
    addresses = map(contiguous_address, (stats, first), shapes) if options.save else (None, None)
    _forward(params, view(out, v.shape), *addresses)
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
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_alpha, log_beta; each tile is recomputed from the saved maxima and sums."""
    params = AttentionParams(q, k, v, log_alpha, log_beta, options, valid)
    gradients = Gradients(grad, q, k, v)
    out, saved = unit_stride(out), (stats.contiguous(), first.contiguous())
    addresses = map(contiguous_address, saved, _saved_shapes(q, v, options))
    _backward(params, gradients, view(out, v.shape), *addresses)
    return gradients.results(log_alpha.dtype, log_beta.dtype)

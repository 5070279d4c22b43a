"""Full attention with the mask: csrc/attention.cpp and csrc/attention_backward.cpp."""

from ctypes import addressof, c_int32, c_void_p

import torch
from torch import Tensor

from ppma.ops.backends.native.library import Kernel, contiguous_address, view
from ppma.ops.backends.native.params import AttentionParams, Gradients, unit_stride
from ppma.ops.layout import heads_last_empty
from ppma.ops.options import AttentionOptions

_saves_first_output = Kernel("ppma_saves_first_output", c_void_p, c_void_p)
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
    stats = torch.empty(_stats_shape(q, options), dtype=torch.float32, device=q.device)
    # Zeros that take no memory, unless the backward pass will need it.
    first = torch.zeros((), dtype=torch.float32, device=q.device).expand(options.softmaxes - 1, *v.shape)
    addresses: tuple[int | None, int | None] = (None, None)
    if options.save:
        first = torch.empty(first.shape, dtype=torch.float32, device=q.device) if _saves_first(params) else first
        addresses = _addresses(params, stats, first, q, v, options)
    _forward(params, view(out, v.shape), *addresses)
    return out, stats, first


def _stats_shape(q: Tensor, options: AttentionOptions) -> tuple[int, ...]:
    return 2 * options.softmaxes, *q.shape[:-1]


def _saves_first(params: AttentionParams) -> bool:
    """Whether the backward pass needs the output of the first of two softmaxes."""
    needs = c_int32()
    _saves_first_output(params, addressof(needs))
    return bool(needs)


def _addresses(
    params: AttentionParams, stats: Tensor, first: Tensor, q: Tensor, v: Tensor, options: AttentionOptions
) -> tuple[int, int | None]:
    of_first = contiguous_address(first, (options.softmaxes - 1, *v.shape)) if _saves_first(params) else None
    return contiguous_address(stats, _stats_shape(q, options)), of_first


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
    out, stats = unit_stride(out), stats.contiguous()
    first = first.contiguous() if _saves_first(params) else first
    _backward(params, gradients, view(out, v.shape), *_addresses(params, stats, first, q, v, options))
    return gradients.results(log_alpha.dtype, log_beta.dtype)

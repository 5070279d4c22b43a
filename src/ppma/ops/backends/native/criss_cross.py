"""Criss-cross attention with the mask: csrc/criss_cross.cpp and csrc/criss_cross_backward.cpp."""

from ctypes import c_void_p

from torch import Tensor

from ppma.ops.backends.native.library import Kernel, view
from ppma.ops.backends.native.params import AttentionParams, Gradients
from ppma.ops.layout import heads_last_empty
from ppma.ops.options import AttentionOptions

_forward = Kernel("ppma_criss_cross_attention", c_void_p, c_void_p)
_backward = Kernel("ppma_criss_cross_attention_backward", c_void_p, c_void_p)


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
    params = AttentionParams(q, k, v, log_alpha, log_beta, options, valid)
    out = heads_last_empty(v, v.shape[-1])
    _forward(params, view(out, v.shape))
    return out


def criss_cross_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    options: AttentionOptions,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_alpha, log_beta, recomputing the line maps."""
    params = AttentionParams(q, k, v, log_alpha, log_beta, options, valid)
    gradients = Gradients(grad, q, k, v)
    _backward(params, gradients)
    return gradients.results(log_alpha.dtype, log_beta.dtype)

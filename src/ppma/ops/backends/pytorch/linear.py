"""Linear and decomposed attention with the mask (Theorem 3): `Q . (L (K outer V))`, a scan of K outer V.

The scan runs over a few features of K at a time, so that K outer V for the whole image never exists.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ppma.ops.backends.pytorch.scan import polyline_scan, polyline_scan_backward
from ppma.ops.layout import compute_dtype, heads_last_empty
from ppma.ops.options import ND_PATHS, Paths

# Elements of K outer V held at once: 64 MB in float32. A chunk is at least one feature, N * dv elements.
CHUNK_ELEMENTS = 1 << 24


def _feature_chunks(q: Tensor, v: Tensor) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, v.numel()))  # an empty batch has no elements
    for start in range(0, q.shape[-1], step):
        yield slice(start, start + step)


def _outer(k: Tensor, v: Tensor) -> Tensor:
    """(..., f), (..., dv) -> (..., f * dv)."""
    return (k[..., :, None] * v[..., None, :]).flatten(-2)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, paths: Paths) -> Tensor:
    """q, k (B, heads, H, W, d), v (B, heads, H, W, dv), log-decays (B, heads, H, W) -> (B, heads, H, W, dv)."""
    dtype = compute_dtype(q.dtype)
    q, k, values = q.to(dtype), k.to(dtype), v.to(dtype)
    total = torch.zeros(values.shape, dtype=dtype, device=v.device)
    for chunk in _feature_chunks(q, v):
        state = polyline_scan(_outer(k[..., chunk], values), [log_beta, log_alpha], ND_PATHS[paths])
        state = state.unflatten(-1, (-1, v.shape[-1]))
        total += (q[..., chunk, None] * state).sum(-2)
    return heads_last_empty(v, v.shape[-1]).copy_(total)


def linear_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, paths: Paths
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_alpha, log_beta, scanning each chunk of features again."""
    dtype = compute_dtype(q.dtype)
    fq, fk, values, grad_out = q.to(dtype), k.to(dtype), v.to(dtype), grad.to(dtype)
    grad_q, grad_k, grad_v = (heads_last_empty(t, t.shape[-1]) for t in (q, k, v))
    grad_values = torch.zeros(values.shape, dtype=dtype, device=v.device)
    decays = [log_beta, log_alpha]
    grad_decays = [torch.zeros_like(decay, memory_format=torch.contiguous_format) for decay in decays]
    for chunk in _feature_chunks(q, v):
        x = _outer(fk[..., chunk], values)
        state = polyline_scan(x, decays, ND_PATHS[paths]).unflatten(-1, (-1, v.shape[-1]))
        grad_q[..., chunk] = (state * grad_out[..., None, :]).sum(-1).to(q.dtype)
        grad_x, *grads = polyline_scan_backward(_outer(fq[..., chunk], grad_out), x, decays, ND_PATHS[paths])
        grad_x = grad_x.unflatten(-1, (-1, v.shape[-1]))
        grad_k[..., chunk] = (grad_x * values[..., None, :]).sum(-1).to(k.dtype)
        grad_values += (grad_x * fk[..., chunk, None]).sum(-2)
        for total, part in zip(grad_decays, grads, strict=True):
            total += part
    grad_v.copy_(grad_values)
    return grad_q, grad_k, grad_v, grad_decays[1], grad_decays[0]

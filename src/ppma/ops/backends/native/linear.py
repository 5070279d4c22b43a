"""Linear and decomposed attention with the mask: csrc/linear.cpp and csrc/linear_backward.cpp."""

import struct
from ctypes import c_void_p

import torch
from torch import Tensor

from ppma.ops.backends.native import library
from ppma.ops.backends.native.decays import edge_decays
from ppma.ops.backends.native.library import Kernel, contiguous_address, view
from ppma.ops.backends.native.scan import BOTH, H2V, V2H
from ppma.ops.layout import heads_last_empty
from ppma.ops.options import Paths

_MODES = {"v2h": V2H, "h2v": H2V, "2d": BOTH}


class LinearParams:
    """`struct LinearParams`, of tensors as in `ppma.ops.layout`, in any strides. Keeps its decays alive."""

    _layout = struct.Struct("2P 8q")

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, paths: Paths) -> None:
        library.require_tokens((*q.shape[2:], v.shape[-1]))
        tokens = q.shape[:-1]
        self.decays = (edge_decays(log_alpha, axis=1), edge_decays(log_beta, axis=0))
        scalars = self._layout.pack(
            *(contiguous_address(decay, tokens) for decay in self.decays),
            *q.shape,
            v.shape[-1],
            _MODES[paths],
            library.threads(),
        )
        shapes = (q.shape, q.shape, (*tokens, v.shape[-1]))
        self._as_parameter_ = b"".join([*map(view, (q, k, v), shapes), scalars])


_forward = Kernel("ppma_linear_attention", c_void_p, c_void_p)
_backward = Kernel("ppma_linear_attention_backward", c_void_p, c_void_p)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, paths: Paths) -> Tensor:
    """q, k (B, heads, H, W, d), v (B, heads, H, W, dv), log-decays (B, heads, H, W) -> (B, heads, H, W, dv)."""
    out = heads_last_empty(v, v.shape[-1])
    _forward(LinearParams(q, k, v, log_alpha, log_beta, paths), view(out, v.shape))
    return out


def linear_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, paths: Paths
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_alpha, log_beta, scanning K outer V and its gradient again."""
    grad_q, grad_k, grad_v = (heads_last_empty(tensor, tensor.shape[-1]) for tensor in (q, k, v))
    tokens = q.shape[:-1]
    grad_alpha, grad_beta = (torch.zeros(tokens, dtype=torch.float32, device=q.device) for _ in range(2))
    views = map(view, (grad, grad_q, grad_k, grad_v), (v.shape, q.shape, k.shape, v.shape))
    of_decays = struct.pack("2P", *(contiguous_address(of_decay, tokens) for of_decay in (grad_alpha, grad_beta)))
    gradients = b"".join([*views, of_decays])  # struct LinearGradients
    _backward(LinearParams(q, k, v, log_alpha, log_beta, paths), gradients)
    return grad_q, grad_k, grad_v, grad_alpha.to(log_alpha.dtype), grad_beta.to(log_beta.dtype)

"""Linear and decomposed attention with the mask: csrc/linear.cpp and csrc/linear_backward.cpp."""

import ctypes
from ctypes import POINTER

import torch
from torch import Tensor

from ppma.ops.backends.native import library
from ppma.ops.backends.native.decays import edge_decays
from ppma.ops.backends.native.library import Kernel, View, contiguous_address
from ppma.ops.backends.native.scan import BOTH, H2V, V2H
from ppma.ops.layout import heads_last_empty
from ppma.ops.options import Paths

_MODES = {"v2h": V2H, "h2v": H2V, "2d": BOTH}


class LinearParams(ctypes.Structure):
    """`struct LinearParams`. Keeps its decays alive."""

    _fields_ = (
        *((name, View) for name in ("q", "k", "v")),
        *((name, ctypes.c_void_p) for name in ("alpha", "beta")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "height", "width", "d", "dv", "mode", "threads")),
    )

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, paths: Paths) -> None:
        """Shapes as in `ppma.ops.layout`, any strides."""
        library.require_tokens((*q.shape[2:], v.shape[-1]))
        tokens = q.shape[:-1]
        self.decays = (edge_decays(log_alpha, axis=1), edge_decays(log_beta, axis=0))
        super().__init__(
            *map(View.of, (q, k, v), (q.shape, q.shape, (*tokens, v.shape[-1]))),
            *(contiguous_address(decay, tokens) for decay in self.decays),
            *q.shape,
            v.shape[-1],
            _MODES[paths],
            library.threads(),
        )


class LinearGradients(ctypes.Structure):
    """`struct LinearGradients`."""

    _fields_ = (
        *((name, View) for name in ("out", "q", "k", "v")),
        *((name, ctypes.c_void_p) for name in ("log_alpha", "log_beta")),
    )


_forward = Kernel("ppma_linear_attention", POINTER(LinearParams), POINTER(View))
_backward = Kernel("ppma_linear_attention_backward", POINTER(LinearParams), POINTER(LinearGradients))


def linear_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, paths: Paths) -> Tensor:
    """q, k (B, heads, H, W, d), v (B, heads, H, W, dv), log-decays (B, heads, H, W) -> (B, heads, H, W, dv)."""
    out = heads_last_empty(v, v.shape[-1])
    _forward(LinearParams(q, k, v, log_alpha, log_beta, paths), View.of(out, v.shape))
    return out


def linear_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, paths: Paths
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_alpha, log_beta, scanning K outer V and its gradient again."""
    grad_q, grad_k, grad_v = (heads_last_empty(tensor, tensor.shape[-1]) for tensor in (q, k, v))
    tokens = q.shape[:-1]
    grad_alpha, grad_beta = (torch.zeros(tokens, dtype=torch.float32, device=q.device) for _ in range(2))
    gradients = LinearGradients(
        *map(View.of, (grad, grad_q, grad_k, grad_v), (v.shape, q.shape, k.shape, v.shape)),
        *(contiguous_address(of_decay, tokens) for of_decay in (grad_alpha, grad_beta)),
    )
    _backward(LinearParams(q, k, v, log_alpha, log_beta, paths), gradients)
    return grad_q, grad_k, grad_v, grad_alpha.to(log_alpha.dtype), grad_beta.to(log_beta.dtype)

"""Vanilla attention with the mask: csrc/attention.cpp and csrc/attention_backward.cpp."""

from ctypes import POINTER, c_void_p

import torch
from torch import Tensor

from ppma.ops.backends.native.library import Kernel, View
from ppma.ops.backends.native.problem import Gradients, Problem, unit_stride
from ppma.ops.layout import heads_last_empty, split_paths

_forward = Kernel("ppma_attention", POINTER(Problem), POINTER(View), c_void_p, c_void_p)
_backward = Kernel("ppma_attention_backward", POINTER(Problem), POINTER(Gradients), POINTER(View), c_void_p, c_void_p)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    combine: str,
    paths: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward; see `ppma.ops.library.attention`."""
    problem = Problem(q, k, v, log_alpha, log_beta, combine, paths, scale)
    softmaxes = len(split_paths(paths)) if combine == "logit" else 1
    out = heads_last_empty(v, v.shape[-1])
    lse = torch.empty(softmaxes, *q.shape[:-1])
    first = torch.empty(softmaxes - 1, *v.shape)
    _forward(problem, View.of(out), lse.data_ptr(), first.data_ptr())
    return out, lse, first


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    out: Tensor,
    lse: Tensor,
    first: Tensor,
    combine: str,
    paths: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_alpha, log_beta; each tile is recomputed from the saved log-sum-exp."""
    problem = Problem(q, k, v, log_alpha, log_beta, combine, paths, scale)
    gradients = Gradients(grad, q, k, v)
    out, lse, first = unit_stride(out), lse.contiguous(), first.contiguous()
    _backward(problem, gradients, View.of(out), lse.data_ptr(), first.data_ptr())
    return gradients.results(log_alpha.dtype, log_beta.dtype)

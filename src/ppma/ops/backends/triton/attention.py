"""Vanilla attention with the mask: fused forward and backward, nothing of size N x N, no atomics."""

from typing import Any

import torch
import triton
from torch import Tensor

from ppma.ops.backends.triton.attention_kernels import attention_backward as backward_kernel
from ppma.ops.backends.triton.attention_kernels import attention_delta, attention_forward
from ppma.ops.backends.triton.configs import attention_configs, attention_tile
from ppma.ops.backends.triton.launch import Config, check_channels, launch, padded, upcast
from ppma.ops.backends.triton.potentials import gradient, potentials
from ppma.ops.backends.triton.tiles import LOG2_E, Field, field
from ppma.ops.layout import heads_last_empty


def _launch(kernel: Any, kind: str, like: Tensor, dv: int, mode: str, **arguments: Any) -> None:
    """Run a kernel with one program for each tile of tokens of each head."""
    batch, heads, height, width, d = like.shape
    rows, cols = attention_tile(height, width)
    launch(
        kernel,
        (batch * heads * triton.cdiv(height, rows) * triton.cdiv(width, cols),),
        attention_configs(kind, like.dtype, width, padded(max(d, dv))),
        heads=heads,
        H=height,
        W=width,
        d=d,
        dv=dv,
        MODE=mode,
        ROWS=rows,
        COLS=cols,
        D=padded(d),
        DV=padded(dv),
        UPCAST=upcast(like),
        **arguments,
    )


def masked_forward(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mode: str, paths: str, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exps and first output of one of the kernel's modes; see `attention`. "linear" has no lse."""
    check_channels(q, v)
    softmaxes = {"hadamard": 1, "logit": 2 if paths == "2d" else 1, "linear": 0}[mode]
    out = heads_last_empty(v, v.shape[-1])
    lse = torch.empty((softmaxes, *q.shape[:-1]), dtype=torch.float32, device=q.device)
    first = torch.empty((max(softmaxes - 1, 0), *v.shape), dtype=torch.float32, device=v.device)
    _launch(
        attention_forward,
        "forward",
        q,
        v.shape[-1],
        mode,
        q=field(q),
        k=field(k),
        v=field(v),
        alpha=field(potentials(log_alpha, 3)),
        beta=field(potentials(log_beta, 2)),
        out=field(out),
        first=field(first[0]) if len(first) else None,
        lse=field(lse) if len(lse) else None,
        score_scale=scale if mode == "linear" else scale * LOG2_E.value,
        V2H=paths != "h2v",
        H2V=paths != "v2h",
    )
    return out, lse, first


class _Slots:
    """Places for what potentials receive, (slots, B, heads, H, W): each program writes to places of its own."""

    def __init__(self, slots: int, like: Tensor) -> None:
        self.buffer = torch.empty((slots, *like.shape), dtype=torch.float32, device=like.device)
        self._taken = 0

    def take(self, slots: int) -> Field:
        start, self._taken = self._taken, self._taken + slots
        return field(self.buffer[start : self._taken])


def masked_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    lse: Tensor | None,
    delta: Tensor | None,
    mode: str,
    paths: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_alpha and log_beta: one launch for the queries' side, one for the keys'."""
    dv = v.shape[-1]
    alpha, beta = potentials(log_alpha, 3), potentials(log_beta, 2)
    grad_q, grad_k, grad_v = (heads_last_empty(tensor, tensor.shape[-1]) for tensor in (q, k, v))
    height, width = q.shape[2:4]
    across = triton.cdiv(width, attention_tile(height, width)[1])
    v2h, h2v = paths != "h2v", paths != "v2h"
    # A path is near from one side and far from the other: 1 + across slots in all.
    slots = (int(v2h) + int(h2v)) * (1 + across)
    alpha_slots, beta_slots = _Slots(slots, log_alpha), _Slots(slots, log_beta)
    for key_side in (False, True):
        near, far = (h2v, v2h) if key_side else (v2h, h2v)
        _launch(
            backward_kernel,
            "keys" if key_side else "queries",
            q,
            dv,
            mode,
            fixed_a=field(k if key_side else q),
            fixed_b=field(v if key_side else grad),
            other_a=field(q if key_side else k),
            other_b=field(grad if key_side else v),
            lse=None if lse is None else field(lse),
            delta=None if delta is None else field(delta),
            alpha=field(alpha),
            beta=field(beta),
            grad_a=field(grad_k if key_side else grad_q),
            grad_b=field(grad_v) if key_side else None,
            alpha_own=alpha_slots.take(1) if near else None,
            alpha_corner=alpha_slots.take(across) if near else None,
            beta_own=beta_slots.take(1) if far else None,
            beta_corner=beta_slots.take(across) if near else None,
            scale=scale,
            score_scale=scale if mode == "linear" else scale * LOG2_E.value,
            NEAR=near,
            FAR=far,
            KEY_SIDE=key_side,
        )
    grad_alpha = gradient(alpha_slots.buffer, 3, log_alpha.dtype)
    return grad_q, grad_k, grad_v, grad_alpha, gradient(beta_slots.buffer, 2, log_beta.dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, combine: str, paths: str, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (B, heads, H, W, d), v (B, heads, H, W, dv), log-decays (B, heads, H, W).

    Returns:
        The output (B, heads, H, W, dv); the log-sum-exp of each softmax, (softmaxes, B, heads, H, W); and, where there
        are two softmaxes, the output of the first, (1, B, heads, H, W, dv), else an empty (0, ...) tensor.
    """
    return masked_forward(q, k, v, log_alpha, log_beta, combine, paths, scale)


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
    """Gradients of q, k, v, log_alpha and log_beta."""
    delta = torch.empty_like(lse)
    batch, heads, height, width, dv = v.shape
    rows, cols = attention_tile(height, width)
    launch(
        attention_delta,
        (batch * heads * triton.cdiv(height, rows) * triton.cdiv(width, cols),),
        [Config(4)],
        grad=field(grad),
        out=field(out),
        first=field(first[0]) if len(first) else None,
        delta=field(delta),
        heads=heads,
        H=height,
        W=width,
        dv=dv,
        ROWS=rows,
        COLS=cols,
        DV=padded(dv),
    )
    return masked_backward(grad, q, k, v, log_alpha, log_beta, lse, delta, combine, paths, scale)

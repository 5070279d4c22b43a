"""Full attention with the mask: fused forward and backward, nothing of size N x N, no atomics."""

from typing import Any

import torch
import triton
from torch import Tensor

from ppma.ops.backends.triton.attention_kernels import attention_backward as backward_kernel
from ppma.ops.backends.triton.attention_kernels import attention_delta, attention_forward
from ppma.ops.backends.triton.configs import attention_configs, attention_tile
from ppma.ops.backends.triton.launch import Config, check_channels, launch, padded, upcast
from ppma.ops.backends.triton.potentials import Slots, gradient, potentials
from ppma.ops.backends.triton.tiles import field
from ppma.ops.layout import heads_last_empty
from ppma.ops.options import AttentionOptions, Paths


def _launch(kernel: Any, kind: str, like: Tensor, dv: int, mode: str, band: int | None, **arguments: Any) -> None:
    """Run a kernel with one program for each tile of tokens of each head."""
    batch, heads, height, width, d = like.shape
    rows, cols = attention_tile(height, width, band)
    launch(
        kernel,
        (batch * heads * triton.cdiv(height, rows) * triton.cdiv(width, cols),),
        attention_configs(kind, like.dtype, width, padded(max(d, dv))),
        heads=heads,
        H=height,
        W=width,
        band=band or height,
        MODE=mode,
        ROWS=rows,
        COLS=cols,
        D=d,
        DV=dv,
        BLOCK_D=padded(d),
        BLOCK_DV=padded(dv),
        UPCAST=upcast(like),
        **arguments,
    )


def masked_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    out: Tensor,
    stats: Tensor | None,
    first: Tensor | None,
    mode: str,
    paths: Paths,
    scale: float,
    band: int | None = None,
) -> None:
    """One of the kernel's modes.

    Args:
        q: (B, heads, H, W, d).
        k: (B, heads, H, W, d).
        v: (B, heads, H, W, dv).
        alpha: potentials along the rows, (1, B, heads, H, W).
        beta: potentials along the columns, (1, B, heads, H, W).
        out: receives the output, (B, heads, H, W, dv).
        stats: receives the largest logit and the sum of each softmax, (2 * softmaxes, B, heads, H, W); None for
            "linear".
        first: receives the output of the first of two softmaxes, (B, heads, H, W, dv); else None.
        mode: "hadamard", "logit" or "linear".
        paths: "v2h", "h2v" or "2d".
        scale: factor on the scores.
        band: how many grid rows see each other, counted from the top; None for all.
    """
    _launch(
        attention_forward,
        "forward",
        q,
        v.shape[-1],
        mode,
        band,
        q=field(q),
        k=field(k),
        v=field(v),
        alpha=field(alpha),
        beta=field(beta),
        out=field(out),
        first=None if first is None else field(first),
        stats=None if stats is None else field(stats),
        scale=scale,
        V2H=paths != "h2v",
        H2V=paths != "v2h",
    )


def potential_slots(height: int, width: int, paths: Paths, band: int | None) -> int:
    """How many slots `masked_backward` takes for what the potentials along one axis receive.

    A path is near from one side, which takes a slot for the fixed token and one for each tile across for the corners of
    the paths along the rows (along the columns only those for the corners), and far from the other side, which takes
    one along the columns: the same number for both axes.
    """
    across = triton.cdiv(width, attention_tile(height, width, band)[1])
    return (2 if paths == "2d" else 1) * (1 + across)


def masked_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    stats: Tensor | None,
    delta: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor],
    alpha_slots: Slots,
    beta_slots: Slots,
    mode: str,
    paths: Paths,
    scale: float,
    band: int | None = None,
) -> None:
    """Gradients of `masked_forward`: one launch for the queries' side, one for the keys'.

    Arguments are those of `masked_forward`. `grad` is the gradient of the output, (B, heads, H, W, dv); `delta` has
    for each softmax the row sums of the output times its gradient, (softmaxes, B, heads, H, W); `grads` receive the
    gradients of q, k and v, the slots those of the potentials along the rows and the columns.
    """
    across = triton.cdiv(q.shape[3], attention_tile(q.shape[2], q.shape[3], band)[1])
    v2h, h2v = paths != "h2v", paths != "v2h"
    for key_side in (False, True):
        near, far = (h2v, v2h) if key_side else (v2h, h2v)
        _launch(
            backward_kernel,
            "keys" if key_side else "queries",
            q,
            v.shape[-1],
            mode,
            band,
            fixed_a=field(k if key_side else q),
            fixed_b=field(v if key_side else grad),
            other_a=field(q if key_side else k),
            other_b=field(grad if key_side else v),
            stats=None if stats is None else field(stats),
            delta=None if delta is None else field(delta),
            alpha=field(alpha),
            beta=field(beta),
            grad_a=field(grads[1] if key_side else grads[0]),
            grad_b=field(grads[2]) if key_side else None,
            alpha_own=alpha_slots.take(1) if near else None,
            alpha_corner=alpha_slots.take(across) if near else None,
            beta_own=beta_slots.take(1) if far else None,
            beta_corner=beta_slots.take(across) if near else None,
            scale=scale,
            NEAR=near,
            FAR=far,
            KEY_SIDE=key_side,
        )


def polyline_attention(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward; see `Backend.polyline_attention`."""
    combine, paths, scale, _ = options
    check_channels(q, v)
    out = heads_last_empty(v, v.shape[-1])
    stats = torch.empty((2 * options.softmaxes, *q.shape[:-1]), dtype=torch.float32, device=q.device)
    first = torch.empty((options.softmaxes - 1, *v.shape), dtype=torch.float32, device=v.device)
    alpha, beta = potentials(log_alpha, 3, combine), potentials(log_beta, 2, combine)
    masked_forward(q, k, v, alpha, beta, out, stats, first[0] if len(first) else None, combine, paths, scale)
    return out, stats, first


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
    """Gradients of q, k, v, log_alpha and log_beta."""
    combine, paths, scale, _ = options
    check_channels(q, v)  # as forward: what another backend saved would not be of use here
    batch, heads, height, width, dv = v.shape
    delta = torch.empty((stats.shape[0] // 2, *q.shape[:-1]), dtype=torch.float32, device=q.device)
    rows, cols = attention_tile(height, width, None)
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
        ROWS=rows,
        COLS=cols,
        DV=dv,
        BLOCK_DV=padded(dv),
    )
    grads = tuple(heads_last_empty(tensor, tensor.shape[-1]) for tensor in (q, k, v))
    alpha, beta = potentials(log_alpha, 3, combine), potentials(log_beta, 2, combine)
    slots = potential_slots(height, width, paths, None)
    alpha_slots, beta_slots = Slots(slots, log_alpha), Slots(slots, log_beta)
    masked_backward(grad, q, k, v, alpha, beta, stats, delta, grads, alpha_slots, beta_slots, combine, paths, scale)
    return (
        *grads,
        gradient(alpha_slots.buffer, 3, log_alpha.dtype),
        gradient(beta_slots.buffer, 2, log_beta.dtype),
    )

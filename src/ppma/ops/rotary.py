"""Rotary positions: channel pairs (2m, 2m+1) of q and k turn by angles that depend on the token."""

from typing import Any

import torch
from torch import Tensor

from ppma.ops.backends import resolve
from ppma.ops.layout import compute_dtype
from ppma.ops.local import native_serves


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs of x; computed in float32 or float64, returned in the dtype of x.

    Args:
        x: (..., head_dim).
        cos: broadcasts to (..., head_dim / 2).
        sin: broadcasts to (..., head_dim / 2).

    Returns:
        Like x.
    """
    even, odd = x.to(compute_dtype(x.dtype)).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return turned.flatten(-2).to(x.dtype)


class _NativeSplit(torch.autograd.Function):
    """q and k turned, v a view; backward writes the three gradients straight into that of the packed tensor.

    As separate views, autograd would fill a packed tensor with zeros for each of them and add these up. With
    `overwrite` q and k are views too; autograd need not know, because no linear layer keeps its result.
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, cos: Tensor, sin: Tensor, overwrite: bool) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = packed.chunk(3, -1)
        ctx.save_for_backward(cos, sin)
        native = resolve("native", "rotate", packed.device, packed.dtype)
        turned = []
        for part in (q, k):
            turned.append(part if overwrite else torch.empty(part.shape, dtype=packed.dtype))
            native.rotate(part, cos, sin, turned[-1], back=False)
        return turned[0], turned[1], v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        *shape, dim = grads[0].shape
        packed = torch.empty(*shape, 3 * dim, dtype=grads[0].dtype)
        native = resolve("native", "rotate", packed.device, packed.dtype)
        q, k, v = packed.chunk(3, -1)
        for grad, part in zip(grads, (q, k), strict=False):
            native.rotate(grad.contiguous(), cos, sin, part, back=True)
        v.copy_(grads[2])
        return packed, None, None, None


def rotary_split(
    packed: Tensor, heads: int, cos: Tensor, sin: Tensor, *, overwrite: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection into q, k and v, with q and k turned.

    Args:
        packed: (B, N, 3 * heads * d), q before k before v.
        heads: attention heads.
        cos: (N, d / 2).
        sin: (N, d / 2).
        overwrite: the packed tensor may be used up, as its values will not be needed: no copies of q and k where there
            is a kernel.
        backend: "native" for the kernel, "auto" for the kernel where there is one, anything else for plain PyTorch.

    Returns:
        Three tensors (B, N, heads, d).
    """
    if native_serves("rotate", backend, packed, cos, sin) and packed.stride(-1) == 1:
        both = [table.repeat_interleave(2, -1) for table in (cos, sin)]
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in _NativeSplit.apply(packed, *both, overwrite))
        return q, k, v
    qkv = packed.unflatten(-1, (3, heads, -1))
    q, k = rotate(qkv[:, :, :2], cos[:, None, None], sin[:, None, None]).unbind(2)
    return q, k, qkv[:, :, 2]

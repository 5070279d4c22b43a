"""Rotary embeddings of q and k in a packed projection: csrc/rotary.cpp."""

import functools
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from ppma.ops.backends.native.library import Kernel, contiguous_address, threads, view
from ppma.ops.projection_formula import rotate

_kernel = Kernel("ppma_rotary", *(c_void_p,) * 4, POINTER(c_int64), c_float, c_int)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, back: bool) -> None:
    """Rotate x (B, N, groups * d) into out by the angles of each token, or back.

    Args:
        x: last axis of unit stride.
        cos: (N, d), contiguous, equal for both channels of a pair.
        sin: (N, d), contiguous.
        out: like x, last axis of unit stride.
        back: rotate by the negative angles.
    """
    batch, tokens, channels = x.shape
    groups, rest = divmod(channels, cos.shape[-1])
    if rest or x.stride(-1) != 1 or out.stride(-1) != 1:
        raise ValueError(
            f"native kernels: expected contiguous channels, a multiple of {cos.shape[-1]}, "
            f"got shape {tuple(x.shape)}, strides {x.stride()} and {out.stride()}"
        )
    angles = (tokens, cos.shape[-1])
    _kernel(
        view(x, x.shape),
        contiguous_address(cos, angles),
        contiguous_address(sin, angles),
        view(out, x.shape),
        (c_int64 * 4)(batch, tokens, groups, cos.shape[-1]),
        -1.0 if back else 1.0,
        threads(),
    )


class _Split(torch.autograd.Function):
    """q and k rotated, v a view; backward writes the three gradients straight into that of the packed tensor.

    As separate views, autograd would fill a packed tensor with zeros for each of them and add these up. With
    `overwrite` q and k are views too; autograd need not know, because no linear layer keeps its result.
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, cos: Tensor, sin: Tensor, overwrite: bool) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        dim = packed.shape[-1] // 3
        qk, v = packed.split((2 * dim, dim), -1)
        rotated = qk if overwrite else torch.empty(qk.shape, dtype=packed.dtype, device=packed.device)
        _rotate(qk, cos, sin, rotated, back=False)
        q, k = rotated.split(dim, -1)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        *shape, dim = grads[0].shape
        if torch.is_grad_enabled():  # the kernel has no gradient of its own
            angles = cos[:, None, ::2], -sin[:, None, ::2]
            of_qk = (rotate(grad.unflatten(-1, (-1, cos.shape[-1])), *angles).flatten(-2) for grad in grads[:2])
            return torch.cat((*of_qk, grads[2]), -1), None, None, None
        packed = torch.empty(*shape, 3 * dim, dtype=grads[0].dtype, device=grads[0].device)
        q, k, v = packed.chunk(3, -1)
        for grad, part in zip(grads, (q, k), strict=False):
            _rotate(grad.contiguous(), cos, sin, part, back=True)
        v.copy_(grads[2])
        return packed, None, None, None


def rotary_split(
    packed: Tensor, heads: int, cos: Tensor, sin: Tensor, overwrite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ppma.ops.rotary.rotary_split`."""
    if packed.stride(-1) != 1:
        packed, overwrite = packed.contiguous(), True
    both = [_for_channels(table, 0 if table.is_inference() else table._version) for table in (cos, sin)]
    shape = (*packed.shape[:-1], heads, packed.shape[-1] // (3 * heads))
    q, k, v = (part.view(shape) for part in _Split.apply(packed, *both, overwrite))
    return q, k, v


@functools.lru_cache(maxsize=64)
def _for_channels(table: Tensor, version: int) -> Tensor:
    """A table with each column twice; layers share theirs, and tensors are compared by identity here."""
    with torch.inference_mode(False), torch.no_grad():
        return table.repeat_interleave(2, -1)

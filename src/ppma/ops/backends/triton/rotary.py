"""Rotary embeddings of q and k in a packed projection: one launch each way, nothing copied but what is rotated."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ppma.ops.backends.triton.launch import Config, cdiv, launch, next_power_of_2, padded
from ppma.ops.backends.triton.tiles import Field, field, head_of, kernel, load_tokens, store_tokens

# Numbers of a tile of tokens: sixteen for each of 128 threads.
TILE = 2048
CONFIGS = [Config(warps=4)]


@triton.jit
def rotated(x, cos, sin):
    """The channel pairs of x (tokens, channels) rotated by angles (tokens, channels / 2)."""
    even, odd = tl.split(tl.reshape(x.to(tl.float32), (x.shape[0], x.shape[1] // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), x.shape)


@kernel
def rotate_tokens(
    q, k, v, out_q, out_k, out_v, cos, sin, heads, tokens,
    BACK: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rotate q and k by the angles of each token or, if BACK, by their negatives; copy v unless it is None.

    A program has a tile of tokens with all their heads, so that it loads the angles once. Fields are
    (B, heads, 1, tokens, D); `out_q` may be `q` itself, because a program reads a tile before it writes it.
    """
    tiles = tl.cdiv(tokens, BLOCK_M)
    batch, tile = head_of(tl.program_id(0), tiles)
    position = tile.to(tl.int32) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = position < tokens
    pair = tl.arange(0, BLOCK_D // 2)
    angles = position[:, None] * (D // 2) + pair[None, :]
    known = inside[:, None] & (pair < D // 2)[None, :]
    c = tl.load(cos + angles, mask=known, other=0.0).to(tl.float32)
    s = tl.load(sin + angles, mask=known, other=0.0).to(tl.float32)
    if BACK:
        s = -s
    for index in range(heads):
        head = index * tl.full((), 1, tl.int64)  # a plain number in the interpreter
        x = load_tokens(q, batch, head, 0, position, inside, D, BLOCK_D)
        store_tokens(out_q, batch, head, 0, position, inside, rotated(x, c, s), D, BLOCK_D)
        x = load_tokens(k, batch, head, 0, position, inside, D, BLOCK_D)
        store_tokens(out_k, batch, head, 0, position, inside, rotated(x, c, s), D, BLOCK_D)
        if v is not None:
            x = load_tokens(v, batch, head, 0, position, inside, D, BLOCK_D)
            store_tokens(out_v, batch, head, 0, position, inside, x, D, BLOCK_D)


def _tokens(tensor: Tensor) -> Field:
    """(B, N, heads, d) as (B, heads, 1, N, d)."""
    return field(tensor.transpose(1, 2).unsqueeze(2))


def _launch(given: Sequence[Tensor], results: Sequence[Tensor], cos: Tensor, sin: Tensor, back: bool) -> None:
    """Rotate the first two of (B, N, heads, d) into the first two results, and copy the third if there is one."""
    batch, tokens, heads, d = given[0].shape
    block = max(1, min(next_power_of_2(tokens), TILE // padded(d)))
    fields, outputs = ([*map(_tokens, tensors), None][:3] for tensors in (given, results))
    launch(
        rotate_tokens,
        (batch * cdiv(tokens, block),),
        CONFIGS,
        **dict(zip(("q", "k", "v"), fields, strict=True)),
        **dict(zip(("out_q", "out_k", "out_v"), outputs, strict=True)),
        cos=cos.contiguous(),
        sin=sin.contiguous(),
        heads=heads,
        tokens=tokens,
        BACK=back,
        BLOCK_M=block,
        D=d,
        BLOCK_D=padded(d),
    )


class _Split(torch.autograd.Function):
    """q and k rotated, v a view; the backward pass writes the gradient of the packed tensor once.

    As separate views, autograd would fill a packed tensor with zeros for each of them and add these up. With
    `overwrite` q and k are views too; autograd need not know, because no linear layer keeps its result.
    """

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, heads: int, cos: Tensor, sin: Tensor, overwrite: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        q, k, v = packed.unflatten(-1, (3, heads, -1)).unbind(2)
        results = (q, k) if overwrite else torch.empty((2, *q.shape), dtype=q.dtype, device=q.device).unbind(0)
        _launch((q, k), results, cos, sin, back=False)
        return results[0], results[1], v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        batch, tokens, heads, d = grads[0].shape
        packed = torch.empty((batch, tokens, 3, heads, d), dtype=grads[0].dtype, device=grads[0].device)
        _launch(grads, packed.unbind(2), *ctx.saved_tensors, back=True)
        return packed.flatten(2), None, None, None, None


def rotary_split(
    packed: Tensor, heads: int, cos: Tensor, sin: Tensor, overwrite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ppma.ops.rotary.rotary_split`."""
    return _Split.apply(packed, heads, cos, sin, overwrite)

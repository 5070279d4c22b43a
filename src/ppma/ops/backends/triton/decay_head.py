"""Decay heads: from the channels of a token to the log-decays of every head, one launch each way."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ppma.ops.backends.triton.launch import Config, cdiv, check_channels, launch, next_power_of_2, padded
from ppma.ops.backends.triton.tiles import Field, field, head_of, kernel, load_plane, load_tokens, plane, store_tokens

# Numbers of a tile of tokens: sixteen for each of 128 threads.
TILE = 2048
CONFIGS = [Config(warps=4)]


@triton.jit
def head_tile(tokens, BLOCK_M: tl.constexpr):
    """Image, positions of a tile of tokens, and which of them exist."""
    batch, tile = head_of(tl.program_id(0), tl.cdiv(tokens, BLOCK_M))
    position = tile.to(tl.int32) * BLOCK_M + tl.arange(0, BLOCK_M)
    return batch, position, position < tokens


@triton.jit
def load_weights(weight, OUTPUT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A row of the linear map, (1, BLOCK_D)."""
    channel = tl.arange(0, BLOCK_D)
    return tl.load(weight + OUTPUT * D + channel, mask=channel < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def activated(z, SOFTPLUS: tl.constexpr):
    """The activation and its slope; NaN is kept."""
    if SOFTPLUS:
        small = tl.exp(-tl.abs(z))
        more = 1.0 + small
        # log(1 + small) to full precision: what rounds `small` in the sum also rounds the quotient.
        rest = tl.where(more == 1.0, small, tl.log(more) * (small / tl.where(more == 1.0, 1.0, more - 1.0)))
        return tl.where(z < 0.0, 0.0, z) + rest, tl.where(z < 0.0, small, 1.0) / more
    else:
        return tl.where(z < 0.0, 0.0, z), (z > 0.0).to(tl.float32)


@triton.jit
def logit_of(x, weights, bias, rate, place, SOFTPLUS: tl.constexpr):
    """Activation, slope and rate of one head and output."""
    z = tl.sum(x * weights, 1) + tl.load(bias + place).to(tl.float32)
    value, slope = activated(z, SOFTPLUS)
    factor = 1.0
    if rate is not None:
        factor = tl.load(rate + place).to(tl.float32)
    return value, slope, factor


@kernel
def decay_forward(
    x, weight, bias, rate, results, heads, tokens,
    SOFTPLUS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The log-decays (outputs, B, heads, tokens) of a tile of tokens with all their heads; `rate` may be None."""
    batch, position, inside = head_tile(tokens, BLOCK_M)
    images = tl.num_programs(0) // tl.cdiv(tokens, BLOCK_M)
    for index in range(heads):
        head = index * tl.full((), 1, tl.int64)  # a plain number in the interpreter
        here = load_tokens(x, batch, head, 0, position, inside, D, BLOCK_D).to(tl.float32)
        for output in tl.static_range(OUTPUTS):
            weights = load_weights(weight, output, D, BLOCK_D)
            value, _, factor = logit_of(here, weights, bias, rate, head * OUTPUTS + output, SOFTPLUS)
            line = (output * images + batch) * heads + head
            tl.store(results + line * tokens + position, -factor * value, mask=inside)


@kernel
def decay_backward(
    grads, x, weight, bias, rate, add, grad_x, weight_sums, head_sums, heads, tokens,
    SOFTPLUS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient of x plus `add`, which may be None, and a tile's sums for the gradients of the parameters.

    `grads` are the gradients of the outputs, a tuple of planes (1, B, heads, 1, tokens). `weight_sums` is
    (programs, outputs, D), `head_sums` (programs, 2, heads, outputs): those of the bias, then those of the rate.
    """
    batch, position, inside = head_tile(tokens, BLOCK_M)
    program = tl.program_id(0).to(tl.int64)
    sums = (tl.zeros((BLOCK_M, BLOCK_D), tl.float32),) * OUTPUTS
    for index in range(heads):
        head = index * tl.full((), 1, tl.int64)
        here = load_tokens(x, batch, head, 0, position, inside, D, BLOCK_D).to(tl.float32)
        total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        if add is not None:
            total = load_tokens(add, batch, head, 0, position, inside, D, BLOCK_D).to(tl.float32)
        longer = ()
        for output in tl.static_range(OUTPUTS):
            weights = load_weights(weight, output, D, BLOCK_D)
            value, slope, factor = logit_of(here, weights, bias, rate, head * OUTPUTS + output, SOFTPLUS)
            grad = load_plane(grads[output], 0, batch, head, 0, position, inside).to(tl.float32)
            moved = -factor * slope * grad
            total += moved[:, None] * weights
            longer = longer + (sums[output] + moved[:, None] * here,)  # noqa: RUF005
            there = head_sums + ((program * 2 * heads + head) * OUTPUTS + output)
            tl.store(there, tl.sum(moved, 0))
            tl.store(there + heads * OUTPUTS, -tl.sum(tl.where(inside, value * grad, 0.0), 0))
        sums = longer
        store_tokens(grad_x, batch, head, 0, position, inside, total, D, BLOCK_D)
    channel = tl.arange(0, BLOCK_D)
    for output in tl.static_range(OUTPUTS):
        there = weight_sums + (program * OUTPUTS + output) * D + channel
        tl.store(there, tl.sum(sums[output], 0), mask=channel < D)


def _heads(tensor: Tensor, heads: int) -> Field:
    """(B, N, heads * d) as (B, heads, 1, N, d)."""
    return field(tensor.unflatten(-1, (heads, -1)).transpose(1, 2).unsqueeze(2))


def _tile(x: Tensor, d: int) -> int:
    return min(next_power_of_2(x.shape[1]), TILE // padded(d))


def _launch(kernel: Any, x: Tensor, weight: Tensor, bias: Tensor, softplus: bool, **arguments: Any) -> None:
    batch, tokens, _ = x.shape
    (heads, outputs), d = bias.shape, weight.shape[-1]
    block = _tile(x, d)
    launch(
        kernel,
        (batch * cdiv(tokens, block),),
        CONFIGS,
        x=_heads(x, heads),
        weight=weight,
        bias=bias,
        heads=heads,
        tokens=tokens,
        SOFTPLUS=softplus,
        OUTPUTS=outputs,
        BLOCK_M=block,
        D=d,
        BLOCK_D=padded(d),
        **arguments,
    )


class _DecayHead(torch.autograd.Function):
    """Tokens for other readers, whose gradient the kernel adds to its own, and the log-decays."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, rate: Tensor | None, softplus: bool
    ) -> tuple[Tensor, ...]:
        weight, bias = weight.contiguous(), bias.contiguous()
        rate = None if rate is None else rate.contiguous()
        ctx.save_for_backward(x, weight, bias, rate)
        ctx.softplus = softplus
        ctx.set_materialize_grads(False)
        heads, outputs = bias.shape
        results = torch.empty((outputs, x.shape[0], heads, x.shape[1]), dtype=torch.float32, device=x.device)
        _launch(decay_forward, x, weight, bias, softplus, rate=rate, results=results)
        return x, *results.unbind(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, add: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, rate = ctx.saved_tensors
        (heads, outputs), d = bias.shape, weight.shape[-1]
        programs = x.shape[0] * cdiv(x.shape[1], _tile(x, d))
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        weight_sums = torch.empty((programs, outputs, d), dtype=torch.float32, device=x.device)
        head_sums = torch.empty((programs, 2, heads, outputs), dtype=torch.float32, device=x.device)
        _launch(
            decay_backward,
            x,
            weight,
            bias,
            ctx.softplus,
            rate=rate,
            grads=_planes(grads, x, heads),
            add=None if add is None else _heads(add, heads),
            grad_x=_heads(grad_x, heads),
            weight_sums=weight_sums,
            head_sums=head_sums,
        )
        grad_bias, grad_rate = head_sums.sum(0).unbind(0)
        grad_weight = weight_sums.sum(0).to(weight.dtype)
        return grad_x, grad_weight, grad_bias.to(bias.dtype), None if rate is None else grad_rate.to(rate.dtype), None


def _planes(grads: Sequence[Tensor | None], x: Tensor, heads: int) -> tuple[Field, ...]:
    """(B, heads, N) as (1, B, heads, 1, N); zeros for outputs that nobody read."""
    zero = torch.zeros((), device=x.device).expand(x.shape[0], heads, x.shape[1])
    return tuple(plane((zero if grad is None else grad)[None, :, :, None]) for grad in grads)


def decay_head(x: Tensor, weight: Tensor, bias: Tensor, rate: Tensor | None, softplus: bool) -> tuple[Tensor, ...]:
    """See `ppma.ops.decay_head.tapped_decay_head`."""
    check_channels(weight)
    return _DecayHead.apply(x, weight, bias, rate, softplus)

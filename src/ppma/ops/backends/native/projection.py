"""q, k, v and log-decays of tokens in training, one linear layer forward and backward: csrc/projection_gradient.cpp.

The logits of the decays are computed where the layer reads the tokens, and for the gradients they are outputs of it
behind q, k and v: as a map of their own they would read every token once more, and once more for the gradients.
"""

import struct
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from ppma.ops.backends.native import library
from ppma.ops.backends.native.composed import composed_gradients
from ppma.ops.backends.native.decay_head import decay_head
from ppma.ops.backends.native.fused_linear import decay_columns, of_whole_vectors, pack, pack_with_slices, rotates, run
from ppma.ops.backends.native.library import Kernel, address, contiguous_address, view
from ppma.ops.backends.native.linear_gradient import weight_gradients
from ppma.ops.backends.native.params import unit_stride
from ppma.ops.backends.native.rotary import rotary_split
from ppma.ops.backends.native.trained_linear import FEWEST_ROWS, trained_linear
from ppma.ops.projection_formula import project as formula
from ppma.ops.watching import observed

_PARAMS = struct.Struct("6P6qii")  # Params of csrc/projection_gradient.cpp, behind its views
_NO_VIEW = bytes(48)
_gradient = Kernel("ppma_projection_gradient", c_void_p)
_slice_gradient = Kernel("ppma_slice_gradient", c_void_p, c_int64, c_int64, c_int64, c_void_p)

_MOST_OUTPUTS = 2
_CACHE_LINE = 16  # floats


def _spread(channels: int) -> int:
    """From token to token an odd number of cache lines: those of a column would else meet in a few sets of a cache."""
    return (-(-channels // _CACHE_LINE) | 1) * _CACHE_LINE


def _rounded_up(channels: int) -> int:
    return -(-channels // _CACHE_LINE) * _CACHE_LINE


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        heads: int,
        cos: Tensor,
        sin: Tensor,
        decay_weight: Tensor | None,
        decay_bias: Tensor | None,
        rate: Tensor | None,
        softplus: bool,
    ) -> tuple[Tensor, ...]:
        (batch, tokens, dim), outputs = x.shape, 0 if decay_bias is None else decay_bias.shape[1]
        rows = torch.empty((batch * tokens, _spread(3 * dim)), dtype=torch.float32, device=x.device)
        log_decays, logits = (
            torch.empty((batch, heads, outputs, tokens), dtype=torch.float32, device=x.device) for _ in range(2)
        )
        columns = None
        if decay_weight is not None and decay_bias is not None:
            sliced, offsets = of_whole_vectors(decay_weight, heads), decay_bias.contiguous()
            rates = None if rate is None else rate.contiguous()
            columns = decay_columns(sliced, offsets, rates, softplus, log_decays, logits)
        out = rows[:, : 3 * dim]
        run(x.flatten(0, 1), pack(weight), bias, None, out, None, (cos, sin), 2 * dim, columns)
        ctx.save_for_backward(x, weight, bias, decay_weight, decay_bias, rate, logits)
        ctx.heads, ctx.rotary, ctx.softplus = heads, (cos, sin), softplus
        ctx.set_materialize_grads(False)
        q, k, v = out.view(batch, tokens, 3, heads, dim // heads).unbind(2)
        return q, k, v, v.view_as(v), *log_decays.unbind(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, decay_weight, decay_bias, rate, logits = ctx.saved_tensors
        if torch.is_grad_enabled():  # the kernels have no gradients of their own
            inputs = (x, weight, bias, ctx.heads, *ctx.rotary, decay_weight, decay_bias, rate, ctx.softplus)
            return composed_gradients(formula, inputs, grads)
        for_x, for_weight, for_bias, *_, for_decay, for_logits, for_rate, _ = ctx.needs_input_grad
        of_rate = torch.empty(rate.shape, dtype=torch.float32, device=x.device) if for_rate else None
        rates = None if rate is None else rate.contiguous()
        rows = _row_gradients(grads, ctx.rotary, logits, rates, ctx.softplus, of_rate)
        of_x = of_weight = of_bias = of_decay = of_logits = None
        if for_x:
            every = pack(weight.mT) if decay_weight is None else pack_with_slices(weight.mT, decay_weight, ctx.heads)
            of_x = torch.empty(x.shape, dtype=torch.float32, device=x.device)
            run(rows, every, None, None, of_x.flatten(0, 1))
        if for_weight or for_bias or for_decay or for_logits:
            of_outputs = (len(weight), rows.shape[1] - len(weight))
            of_every, of_every_bias = weight_gradients(rows, x.flatten(0, 1), [1.0], 1.0)
            of_weight, of_matrix = of_every.split(of_outputs)
            of_bias, of_offsets = of_every_bias.split(of_outputs)
            if decay_bias is not None:
                of_decay, of_logits = _of_slices(of_matrix, ctx.heads), of_offsets.view(decay_bias.shape)
        of_parameters = (of_weight, of_bias, None, None, None, of_decay, of_logits, of_rate, None)
        return of_x, *(
            grad if wanted else None for grad, wanted in zip(of_parameters, ctx.needs_input_grad[1:], strict=True)
        )


def _of_slices(matrix: Tensor, heads: int) -> Tensor:
    """The gradient of a map (outputs, d) from that of `as_matrix` of it."""
    outputs, d = len(matrix) // heads, matrix.shape[1] // heads
    found = torch.empty((outputs, d), dtype=torch.float32, device=matrix.device)
    of_matrix = contiguous_address(matrix, (heads * outputs, heads * d))
    _slice_gradient(of_matrix, heads, outputs, d, contiguous_address(found, found.shape))
    return found


def _row_gradients(
    grads: tuple[Tensor | None, ...],
    rotary: tuple[Tensor, Tensor],
    logits: Tensor,
    rate: Tensor | None,
    softplus: bool,
    of_rate: Tensor | None,
) -> Tensor:
    """The gradient of all outputs of the layer, (B * N, 3 * heads * d + heads * outputs).

    Args:
        grads: of q, k, v, v again, (B, N, heads, d), and of the log-decays, (B, heads, N); None for zeros.
        rotary: cosines and sines.
        logits: (B, heads, outputs, N).
        rate: (heads, outputs) or None.
        softplus: whether the activation is softplus.
        of_rate: takes the gradient of `rate`, or None.
    """
    batch, heads, outputs, tokens = logits.shape
    d = 2 * rotary[0].shape[-1]
    columns = heads * (3 * d + outputs)
    stride = _rounded_up(3 * heads * d + _rounded_up(heads * outputs))  # the logits are written in whole vectors
    rows = torch.empty((batch * tokens, stride), dtype=torch.float32, device=logits.device)
    of_heads = [None if grad is None else unit_stride(grad.flatten(2)) for grad in grads[:4]]
    shape, lines = (batch, tokens, heads * d), (batch, heads, tokens)
    views = [_NO_VIEW if grad is None else view(grad, shape) for grad in of_heads]
    views += [_NO_VIEW if grad is None else view(grad, lines) for grad in grads[4:]]
    views += [_NO_VIEW] * (4 + _MOST_OUTPUTS - len(views))
    _gradient(
        b"".join(views)
        + _PARAMS.pack(
            *(contiguous_address(table, (tokens, d // 2)) for table in rotary),
            contiguous_address(logits, logits.shape),
            0 if rate is None else contiguous_address(rate, (heads, outputs)),
            address(rows, rows.shape),
            0 if of_rate is None else contiguous_address(of_rate, (heads, outputs)),
            batch,
            tokens,
            heads,
            outputs,
            d,
            rows.shape[1],
            softplus,
            library.threads(),
        )
    )
    return rows[:, :columns]


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    heads: int,
    cos: Tensor,
    sin: Tensor,
    decay_weight: Tensor | None,
    decay_bias: Tensor | None,
    rate: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, ...]:
    """See `ppma.ops.projection.project`."""
    dim = x.shape[-1]
    tensors = (x, weight, bias, decay_weight, decay_bias, rate)
    if x.shape[:-1].numel() < FEWEST_ROWS or not rotates(2 * dim, dim // heads) or observed(*tensors):
        return _one_by_one(x, weight, bias, heads, cos, sin, decay_weight, decay_bias, rate, softplus)
    if decay_weight is not None and decay_bias is not None:
        decay_weight, decay_bias = decay_weight.float().contiguous(), decay_bias.float()
        rate = None if rate is None else rate.float()
    library.require_tokens(x.shape[1:])
    x, bias = x if x.stride(-1) == 1 else x.contiguous(), bias.contiguous()
    return _Project.apply(x, weight, bias, heads, cos, sin, decay_weight, decay_bias, rate, softplus)


def _one_by_one(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    heads: int,
    cos: Tensor,
    sin: Tensor,
    decay_weight: Tensor | None,
    decay_bias: Tensor | None,
    rate: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, ...]:
    log_decays: Sequence[Tensor] = ()
    if decay_weight is not None and decay_bias is not None:
        x, *log_decays = decay_head(x, decay_weight, decay_bias, rate, softplus)
    q, k, v = rotary_split(trained_linear(x, weight, bias, None, None), heads, cos, sin, True)
    return q, k, v, v, *log_decays

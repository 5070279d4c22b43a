"""Decay heads: from the channels of a token to the log-decays of every head: csrc/decay_head.cpp."""

import struct
from ctypes import c_void_p
from typing import Any

import torch
from torch import Tensor

from ppma.ops.backends.contract import BackendUnavailableError
from ppma.ops.backends.native import library
from ppma.ops.backends.native.composed import composed_gradients
from ppma.ops.backends.native.library import Kernel, contiguous_address, view
from ppma.ops.decay_formula import decay_head as composed
from ppma.ops.watching import observed

_PARAMS = struct.Struct("PPP5qii")  # DecayHeadParams of csrc/decay_head.cpp, behind the view of x
_GRADIENTS = struct.Struct("4P")  # DecayHeadGradients, behind its views
_NO_VIEW = bytes(48)
_forward = Kernel("ppma_decay_head", c_void_p, c_void_p)
_backward = Kernel("ppma_decay_head_backward", c_void_p, c_void_p)

_MOST_OUTPUTS = 2


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _params(x: Tensor, weight: Tensor, bias: Tensor, rate: Tensor | None, softplus: bool) -> bytes:
    (batch, tokens, _), (heads, outputs), d = x.shape, bias.shape, weight.shape[-1]
    library.require_tokens((tokens, heads, d))
    return view(x, (batch, tokens, heads * d)) + _PARAMS.pack(
        contiguous_address(weight, (outputs, d)),
        contiguous_address(bias, (heads, outputs)),
        0 if rate is None else contiguous_address(rate, (heads, outputs)),
        batch,
        tokens,
        heads,
        outputs,
        d,
        softplus,
        library.threads(),
    )


def _log_decays(x: Tensor, weight: Tensor, bias: Tensor, rate: Tensor | None, softplus: bool) -> Tensor:
    """(outputs, B, heads, N)."""
    heads, outputs = bias.shape
    out = torch.empty((outputs, len(x), heads, x.shape[1]), dtype=torch.float32, device=x.device)
    _forward(_params(x, weight, bias, rate, softplus), contiguous_address(out, out.shape))
    return out


class _DecayHead(torch.autograd.Function):
    """Tokens for other readers, whose gradient the kernel adds to its own, and the log-decays."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, rate: Tensor | None, softplus: bool
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight, bias, rate)
        ctx.softplus = softplus
        ctx.set_materialize_grads(False)
        return x, *_log_decays(x, weight, bias, rate, softplus).unbind(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, rate = ctx.saved_tensors
        if torch.is_grad_enabled():  # the kernel has no gradient of its own
            inputs = (x, weight, bias, rate, ctx.softplus)
            return composed_gradients(lambda x, *others: composed(x.view_as(x), *others), inputs, grads)
        add, *of_outputs = grads
        if all(grad is None for grad in of_outputs):
            return add, None, None, None, None
        of_x, of_weight, of_bias = (
            torch.empty(like.shape, dtype=torch.float32, device=x.device) for like in (x, weight, bias)
        )
        of_rate = None if rate is None else torch.empty(rate.shape, dtype=torch.float32, device=x.device)
        add = None if add is None else _unit_stride(add)
        lines = (len(x), len(bias), x.shape[1])
        views = [_NO_VIEW if grad is None else view(grad, lines) for grad in of_outputs]
        views += [_NO_VIEW] * (_MOST_OUTPUTS - len(views)) + [_NO_VIEW if add is None else view(add, x.shape)]
        addresses = (contiguous_address(grad, grad.shape) for grad in (of_x, of_weight, of_bias))
        _backward(
            _params(x, weight, bias, rate, ctx.softplus),
            b"".join(views)
            + _GRADIENTS.pack(*addresses, 0 if of_rate is None else contiguous_address(of_rate, of_rate.shape)),
        )
        return of_x, of_weight, of_bias, of_rate, None


def decay_head(x: Tensor, weight: Tensor, bias: Tensor, rate: Tensor | None, softplus: bool) -> tuple[Tensor, ...]:
    """See `ppma.ops.decay_head.tapped_decay_head`."""
    if not 1 <= len(weight) <= _MOST_OUTPUTS:
        raise BackendUnavailableError(f"native kernels: expected one or two log-decays a head, got {len(weight)}")
    if observed(x, weight, bias, rate):
        return composed(x, weight, bias, rate, softplus)
    weight, bias = weight.float().contiguous(), bias.float().contiguous()
    rate = None if rate is None else rate.float().contiguous()
    if torch.is_grad_enabled():
        return _DecayHead.apply(_unit_stride(x), weight, bias, rate, softplus)
    return x, *_log_decays(_unit_stride(x), weight, bias, rate, softplus).unbind(0)

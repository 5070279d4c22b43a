"""Channel-last depthwise convolution with GELU before and a sum after it: csrc/depthwise.cpp."""

import ctypes
from ctypes import POINTER, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ppma.ops.backends.contract import BackendUnavailableError
from ppma.ops.backends.native.library import Kernel, contiguous_address, require_tokens, threads, view
from ppma.ops.backends.native.trained_linear import Gradients, product
from ppma.ops.watching import observed

_SIZES = POINTER(c_int64)
_depthwise = Kernel("ppma_depthwise_conv", *(c_void_p,) * 5, _SIZES, c_int64, c_int, c_int)
_depthwise_backward = Kernel(
    "ppma_depthwise_conv_backward", *(c_void_p,) * 4, c_int, *(c_void_p,) * 4, _SIZES, c_int64, c_int, c_int
)

KERNEL_SIZES = (3, 5)


def _channels_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _sizes(x: Tensor) -> ctypes.Array:
    require_tokens(x.shape[1:])
    return (c_int64 * 4)(*x.shape)


def _taps(weight: Tensor, x: Tensor) -> int:
    """The address of a contiguous (C, 1, k, k)."""
    size = weight.shape[-1]
    return contiguous_address(weight, (x.shape[-1], 1, size, size))


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gelu: bool) -> Tensor:
    """x, residual (B, H, W, C), weight (C, 1, k, k), bias (C,) -> (B, H, W, C)."""
    x, weight = _channels_last(x), weight.contiguous()
    bias = bias if bias is None else bias.contiguous()
    residual = residual if residual is None else _channels_last(residual)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _depthwise(
        view(x, x.shape),
        _taps(weight, x),
        None if bias is None else contiguous_address(bias, x.shape[-1:]),
        None if residual is None else view(residual, x.shape),
        view(out, x.shape),
        _sizes(x),
        weight.shape[-1],
        gelu,
        threads(),
    )
    return out


def _convolve_backward(
    grad: Tensor, x: Tensor, weight: Tensor, own_residual: bool, gelu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    return gradients(grad, x, weight, None, own_residual, gelu, None)


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, own_residual: bool, gelu: bool, out: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; `out`, for a 3x3 kernel with GELU and no residual, takes the output again."""
    grad, x, weight = _channels_last(grad), _channels_last(x), weight.contiguous()
    bias = bias if bias is None else bias.contiguous()
    grad_x, grad_weight, grad_bias = (
        torch.empty(shape, dtype=torch.float32, device=x.device) for shape in (x.shape, weight.shape, x.shape[-1:])
    )
    _depthwise_backward(
        view(grad, x.shape),
        view(x, x.shape),
        _taps(weight, x),
        None if bias is None else contiguous_address(bias, x.shape[-1:]),
        own_residual,
        view(grad_x, x.shape),
        _taps(grad_weight, x),
        contiguous_address(grad_bias, x.shape[-1:]),
        None if out is None else view(out, x.shape),
        _sizes(x),
        weight.shape[-1],
        gelu,
        threads(),
    )
    return grad_x, grad_weight, grad_bias


# For what follows PyTorch's dispatcher (`backends.observed`).
_operator = torch.library.custom_op("ppma::depthwise_conv", _convolve, mutates_args=())
_backward_operator = torch.library.custom_op("ppma::depthwise_conv_backward", _convolve_backward, mutates_args=())


@_operator.register_fake
def _(x, weight, bias, residual, gelu):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@_backward_operator.register_fake
def _(grad, x, weight, own_residual, gelu):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), weight.new_empty(weight.shape), x.new_empty(x.shape[-1])


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, residual, ctx.gelu = inputs
    ctx.has_bias, ctx.has_residual = bias is not None, residual is not None
    ctx.save_for_backward(x, weight)


def _gradient(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    run = _backward_operator if torch.is_grad_enabled() or observed(grad, x, weight) else _convolve_backward
    grad_x, grad_weight, grad_bias = run(grad, x, weight, not ctx.has_residual, ctx.gelu)
    return grad_x, grad_weight, grad_bias if ctx.has_bias else None, grad if ctx.has_residual else None, None


_operator.register_autograd(_gradient, setup_context=_setup)


class _Convolution(torch.autograd.Function):
    """The same operator, without a call through the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _setup(ctx, inputs, None)
        return _convolve(*inputs)

    backward = staticmethod(_gradient)


def depthwise_conv(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gelu: bool) -> Tensor:
    """See `ppma.ops.depthwise.depthwise_conv`."""
    if weight.shape[-1] not in KERNEL_SIZES:
        raise BackendUnavailableError(
            f"native kernels: expected a depthwise kernel of size 3 or 5, got {weight.shape[-1]}"
        )
    if observed(x, weight, bias, residual):
        return _operator(x, weight, bias, residual, gelu)
    run = _Convolution.apply if torch.is_grad_enabled() else _convolve
    return run(x, weight, bias, residual, gelu)


class _ConvolutionThenLinear(torch.autograd.Function):
    """The convolution's backward pass computes its output again, for the gradient of the linear layer's weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        taps: Tensor,
        offsets: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        factors: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, taps, offsets, weight)
        ctx.factors, ctx.has_residual = factors, residual is not None
        return product(_convolve(x, taps, offsets, None, True), weight, bias, residual, factors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, taps, offsets, weight = ctx.saved_tensors
        of_linear = Gradients(grad, ctx.factors)
        mixed = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        of_x, of_taps, of_offsets = gradients(
            of_linear.of_input(weight).view(x.shape), x, taps, offsets, True, True, mixed
        )
        of_weight, of_bias = of_linear.of_parameters(mixed.flatten(0, -2), *ctx.needs_input_grad[3:5])
        of_residual = grad if ctx.has_residual else None
        return of_x, of_taps, None if offsets is None else of_offsets, of_weight, of_bias, of_residual, None


def depthwise_linear(
    x: Tensor,
    taps: Tensor,
    offsets: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """See `ppma.ops.depthwise.depthwise_linear`."""
    if taps.shape[-1] != 3:
        raise BackendUnavailableError(f"native kernels: expected a depthwise kernel of size 3, got {taps.shape[-1]}")
    return _ConvolutionThenLinear.apply(x, taps, offsets, weight, bias, residual, factors)

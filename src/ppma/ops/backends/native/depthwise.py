"""Glue to csrc/depthwise.cpp: channel-last depthwise convolution with GELU before and a sum after it."""

import ctypes
from ctypes import POINTER, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from ppma.ops.backends.native.library import Kernel, View, contiguous_address, require_tokens, threads

_VIEW, _SIZES = POINTER(View), POINTER(c_int64)
_depthwise = Kernel("ppma_depthwise", _VIEW, c_void_p, c_void_p, _VIEW, _VIEW, _SIZES, c_int64, c_int, c_int)
_depthwise_backward = Kernel(
    "ppma_depthwise_backward",
    *(_VIEW, _VIEW, c_void_p, c_int, _VIEW, c_void_p, c_void_p, _SIZES, c_int64, c_int, c_int),
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
    if size not in KERNEL_SIZES:
        raise ValueError(f"native kernels: expected a depthwise kernel of size 3 or 5, got {size}")
    return contiguous_address(weight, (x.shape[-1], 1, size, size))


def depthwise_add(x: Tensor, weight: Tensor, bias: Tensor | None, base: Tensor | None, gelu: bool) -> Tensor:
    """x, base (B, H, W, C), weight (C, 1, k, k), bias (C,) -> (B, H, W, C): base + conv(act(x)) + bias."""
    x, weight = _channels_last(x), weight.contiguous()
    bias = bias if bias is None else bias.contiguous()
    base = base if base is None else _channels_last(base)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _depthwise(
        View.of(x, x.shape),
        _taps(weight, x),
        None if bias is None else contiguous_address(bias, x.shape[-1:]),
        None if base is None else View.of(base, x.shape),
        View.of(out, x.shape),
        _sizes(x),
        weight.shape[-1],
        gelu,
        threads(),
    )
    return out


def depthwise_add_backward(
    grad: Tensor, x: Tensor, weight: Tensor, own_base: bool, gelu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    grad, x, weight = _channels_last(grad), _channels_last(x), weight.contiguous()
    grad_x, grad_weight, grad_bias = (
        torch.empty(shape, dtype=torch.float32, device=x.device) for shape in (x.shape, weight.shape, x.shape[-1:])
    )
    _depthwise_backward(
        View.of(grad, x.shape),
        View.of(x, x.shape),
        _taps(weight, x),
        own_base,
        View.of(grad_x, x.shape),
        _taps(grad_weight, x),
        contiguous_address(grad_bias, x.shape[-1:]),
        _sizes(x),
        weight.shape[-1],
        gelu,
        threads(),
    )
    return grad_x, grad_weight, grad_bias

"""Glue to csrc/depthwise.cpp: channel-last depthwise convolution with GELU before and a sum after it."""

import ctypes
from ctypes import POINTER, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from ppma.ops.backends.native.library import Kernel, View, threads

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
    return (c_int64 * 4)(*x.shape)


def depthwise_add(x: Tensor, weight: Tensor, bias: Tensor | None, base: Tensor | None, gelu: bool) -> Tensor:
    """x, base (B, H, W, C), weight (C, 1, k, k), bias (C,) -> (B, H, W, C): base + conv(act(x)) + bias."""
    x, weight = _channels_last(x), weight.contiguous()
    bias = bias if bias is None else bias.contiguous()
    base = base if base is None else _channels_last(base)
    out = torch.empty(x.shape)
    _depthwise(
        View.of(x),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if base is None else View.of(base),
        View.of(out),
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
    grad_x, grad_weight, grad_bias = torch.empty(x.shape), torch.empty(weight.shape), torch.empty(x.shape[-1])
    _depthwise_backward(
        View.of(grad),
        View.of(x),
        weight.data_ptr(),
        own_base,
        View.of(grad_x),
        grad_weight.data_ptr(),
        grad_bias.data_ptr(),
        _sizes(x),
        weight.shape[-1],
        gelu,
        threads(),
    )
    return grad_x, grad_weight, grad_bias

"""3x3 convolutions in training: the gradients of weight and bias have a kernel (csrc/conv_gradient.cpp). The output
and, for stride 1, the gradient of the input come from Winograd's algorithm (csrc/winograd.cpp).
"""

import struct
from ctypes import c_void_p
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ppma.ops.backends.native import library
from ppma.ops.backends.native.fused_conv import convolve, uses_winograd
from ppma.ops.backends.native.library import Kernel, contiguous_address, view
from ppma.ops.watching import observed

_PARAMS = struct.Struct("PP7q")  # Params of csrc/conv_gradient.cpp, behind the views
_kernel = Kernel("ppma_conv_gradient", c_void_p)

# PyTorch's convolution is as fast in narrower rows.
_LEAST_WIDTH = 14
# Inputs for each weight. Weights change in every step, and with fewer inputs their transform costs more than it saves.
_LEAST_INPUTS = 4


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    return F.conv2d(_images(x), weight, bias, stride, 1).permute(0, 2, 3, 1)


def _images(x: Tensor) -> Tensor:
    """(B, H, W, C) to (B, C, H, W) in channels-last memory."""
    return x.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of x for stride 1: a convolution with the kernels turned by 180 degrees, from outputs to inputs."""
    turned = weight.flip(2, 3).transpose(0, 1)
    return convolve(grad, turned, grad.new_zeros(len(turned)), 1, False, {})


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias."""
    grad, x = grad.contiguous(), x.contiguous()
    outputs, inputs = weight.shape[:2]
    batch, height, width, _ = x.shape
    library.require_tokens((height, width, inputs, outputs))
    grad_weight, grad_bias = (
        torch.empty(shape, dtype=torch.float32, device=x.device) for shape in (weight.shape, (outputs,))
    )
    params = _PARAMS.pack(
        contiguous_address(grad_weight, (outputs, inputs, 3, 3)),
        contiguous_address(grad_bias, (outputs,)),
        batch,
        height,
        width,
        inputs,
        outputs,
        stride,
        library.threads(),
    )
    shape = (batch, -(-height // stride), -(-width // stride), outputs)
    _kernel(view(x, (batch, height, width, inputs)) + view(grad, shape) + params)
    return grad_weight, grad_bias


def _gradients(grad: Tensor, x: Tensor, weight: Tensor, stride: int, needed: list[bool]) -> tuple[Tensor | None, ...]:
    """PyTorch's gradients of x, weight and bias."""
    sizes = ([weight.shape[0]], [stride] * 2, [1, 1], [1, 1], False, [0, 0], 1)
    grad_x, *others = torch.ops.aten.convolution_backward(_images(grad), _images(x), weight, *sizes, needed)
    return None if grad_x is None else grad_x.permute(0, 2, 3, 1), *others


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
        ctx.stride = stride
        ctx.save_for_backward(x, weight)
        if _by_winograd(x, weight, stride) and not observed(x, weight, bias):
            return convolve(x, weight, weight.new_zeros(len(weight)) if bias is None else bias, stride, False, {})
        return _convolve(x, weight, bias, stride)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:3])
        # The kernel has no gradient of its own.
        if torch.is_grad_enabled() or observed(grad, x, weight) or not any(needed[1:]):
            return *_gradients(grad, x, weight, ctx.stride, needed), None
        grad_x = None
        if needed[0] and ctx.stride == 1 and _by_winograd(x, weight, 1):
            grad_x = input_gradient(grad, weight)
        elif needed[0]:
            grad_x = _gradients(grad, x, weight, ctx.stride, [True, False, False])[0]
        grad_weight, grad_bias = weight_gradient(grad, x, weight, ctx.stride)
        return grad_x, grad_weight, grad_bias if needed[2] else None, None


def conv3x3(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """See `ppma.ops.conv.conv3x3`."""
    if _trained(x, weight, stride):
        return _Convolution.apply(x, weight, bias, stride)
    return _convolve(x, weight, bias, stride)


def _by_winograd(x: Tensor, weight: Tensor, stride: int) -> bool:
    return uses_winograd(weight, stride) and x.numel() >= _LEAST_INPUTS * weight.numel()


def _trained(x: Tensor, weight: Tensor, stride: int) -> bool:
    """Whether there will be a gradient of the weight for which the kernel is the faster one."""
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and weight.shape[2:] == (3, 3)
        and -(-x.shape[2] // stride) >= _LEAST_WIDTH
        and library.isa() != library.INSTRUCTION_SETS[-1]
    )

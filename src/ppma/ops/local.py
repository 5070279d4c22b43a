"""The local part of a block: a depthwise convolution of channel-last tokens with what stands around it.

On the CPU in float32 one native kernel does it in a single pass; everywhere else, and where a graph is captured, it is
the plain composition.
"""

import importlib
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor

from ppma.ops.backends import BackendUnavailableError, resolve
from ppma.ops.layout import autocast_dtype


@torch.library.custom_op("ppma::depthwise_add", mutates_args=())
def _depthwise_add(x: Tensor, weight: Tensor, bias: Tensor | None, base: Tensor | None, gelu: bool) -> Tensor:
    return resolve("native", "depthwise_add", x.device, x.dtype).depthwise_add(x, weight, bias, base, gelu)


@torch.library.custom_op("ppma::depthwise_add_backward", mutates_args=())
def _depthwise_add_backward(
    grad: Tensor, x: Tensor, weight: Tensor, own_base: bool, gelu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    module = resolve("native", "depthwise_add_backward", x.device, x.dtype)
    return module.depthwise_add_backward(grad, x, weight, own_base, gelu)


@_depthwise_add.register_fake
def _(x, weight, bias, base, gelu):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@_depthwise_add_backward.register_fake
def _(grad, x, weight, own_base, gelu):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), weight.new_empty(weight.shape), x.new_empty(x.shape[-1])


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, base, ctx.gelu = inputs
    ctx.has_bias, ctx.has_base = bias is not None, base is not None
    ctx.save_for_backward(x, weight)


def _gradient(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    grad_x, grad_weight, grad_bias = _depthwise_add_backward(grad, x, weight, not ctx.has_base, ctx.gelu)
    return grad_x, grad_weight, grad_bias if ctx.has_bias else None, grad if ctx.has_base else None, None


_depthwise_add.register_autograd(_gradient, setup_context=_setup)


def native_serves(operator: str, backend: str, x: Tensor, *others: Tensor | None) -> bool:
    """Whether the native kernel for `operator` runs, or the composition of PyTorch's own operations.

    The kernel runs eagerly, in float32 on the CPU. Captured graphs must not depend on it, and transforms and forward
    mode need what can be differentiated in every way.

    Args:
        operator: its name in the backend.
        backend: as the user chose it; "auto" takes the kernel where there is one.
        x: the tensor that decides on device and dtype.
        others: further tensors that may carry derivatives.

    Raises:
        BackendUnavailableError: `backend` is "native" and cannot run for such tensors.
    """
    if backend not in ("auto", "native"):
        return False
    captured = torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()
    dual = any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in (x, *others))
    if captured or dual or autocast_dtype(x.device) is not None:
        return False
    if backend == "native":
        return resolve("native", operator, x.device, x.dtype) is not None
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return False
    try:
        return resolve("native", operator, x.device, x.dtype) is not None
    except BackendUnavailableError:
        return False


def depthwise_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    base: Tensor | None = None,
    *,
    gelu: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`base + conv(act(x)) + bias`: a depthwise convolution that keeps the size, and the sum it is part of.

    Args:
        x: (B, H, W, C).
        weight: (C, 1, k, k) with k odd.
        bias: (C,) or None.
        base: (B, H, W, C), or None for act(x) itself.
        gelu: act is GELU instead of the identity.
        backend: "native" for the kernel (3x3 and 5x5), "auto" for the kernel where there is one, anything else for
            PyTorch's own convolution.

    Returns:
        (B, H, W, C).
    """
    size = weight.shape[-1]
    if (
        native_serves("depthwise_add", backend, x, weight, bias, base)
        and size in importlib.import_module("ppma.ops.backends.native.depthwise").KERNEL_SIZES
    ):
        return _depthwise_add(x, weight, bias, base, gelu)
    values = F.gelu(x) if gelu else x
    out = F.conv2d(values.permute(0, 3, 1, 2), weight, bias, padding=size // 2, groups=weight.shape[0])
    return out.permute(0, 2, 3, 1) + (values if base is None else base)

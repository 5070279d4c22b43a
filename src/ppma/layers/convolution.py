"""Linear layers and convolutions on channel-last tensors.

A contiguous (B, H, W, C) tensor, permuted, is exactly what PyTorch calls channels-last memory, so the convolutions
below read and write the layout of the attention without a copy.
"""

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.nn.modules import module as modules

from ppma.ops.backends import kernels_serve
from ppma.ops.conv import conv3x3
from ppma.ops.depthwise import depthwise_conv
from ppma.ops.options import BackendName
from ppma.ops.trained_linear import trained_linear
from ppma.ops.watching import observed


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer with bias; weights start truncated normal (std 0.02), biases at 0."""
    layer = nn.Linear(inputs, outputs)
    trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    return layer


# Hooks for all modules; PyTorch adds to these dictionaries and never replaces them. Its own function is missing in 2.6.
_of_all_modules = (
    modules._global_forward_hooks,
    modules._global_forward_pre_hooks,
    modules._global_backward_hooks,
    modules._global_backward_pre_hooks,
)


def unhooked(*layers: nn.Module) -> bool:
    """Whether nobody would miss the calls of these layers.

    They have no hooks, there are none for all modules, and no instance has a `forward` of its own, which is somebody's
    wrapper, or was compiled.
    """
    if any(_of_all_modules):
        return False
    for layer in layers:
        if (
            layer._forward_hooks
            or layer._forward_pre_hooks
            or layer._backward_hooks
            or layer._backward_pre_hooks
            or layer._compiled_call_impl is not None
            or "forward" in layer.__dict__
        ):
            return False
    return True


def trains(layer: nn.Module, x: Tensor, backend: BackendName = "auto") -> bool:
    """Whether `trained_linear` may take the place of `layer(x)`.

    It has a kernel for x, gradients are wanted, and nobody follows the call: `layer` is a plain linear layer without
    hooks, and there is no profiler, dispatch mode or captured graph.
    """
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and type(layer) is nn.Linear
        and x.dtype == torch.float32
        and unhooked(layer)
        and not observed(x, layer.weight)
        and kernels_serve(backend, "trained_linear", x, layer.weight)
    )


def apply_linear(layer: nn.Linear, x: Tensor, backend: BackendName = "auto") -> Tensor:
    """`layer(x)`, in training by `trained_linear`."""
    if trains(layer, x, backend):
        return trained_linear(x, layer.weight, layer.bias, backend=backend)
    return layer(x)


class Conv3x3(nn.Conv2d):
    """A 3x3 convolution with a border of one zero, (B, H, W, in) to (B, H / stride, W / stride, out), rounded up.

    Args:
        inputs: channels.
        outputs: channels.
        stride: 1 or 2.

    Attributes:
        backend: selects the implementation.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, 3, stride=stride, padding=1)
        self.backend: BackendName = "auto"

    def forward(self, x: Tensor) -> Tensor:
        return conv3x3(x, self.weight, self.bias, stride=self.stride[0], backend=self.backend)


class ChannelLastConv(nn.Conv2d):
    """A 2D convolution, (B, H, W, in) to (B, H', W', out)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class ChannelLastBatchNorm(nn.BatchNorm2d):
    """Batch norm over the last axis of (B, H, W, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class DepthwiseConv(ChannelLastConv):
    """A depthwise convolution that keeps the size of the grid.

    Args:
        dim: channels.
        kernel: odd size.
        backend: selects the implementation of `add`.

    Attributes:
        backend: selects the implementation of `add`.
    """

    def __init__(self, dim: int, kernel: int, backend: BackendName = "auto") -> None:
        super().__init__(dim, dim, kernel, padding=kernel // 2, groups=dim)
        self.backend = backend

    def add(self, x: Tensor, residual: Tensor | None = None, *, gelu: bool = False) -> Tensor:
        """`residual + conv(act(x))`, in one pass where there is a kernel for it.

        Args:
            x: (B, H, W, dim).
            residual: (B, H, W, dim), or None for act(x).
            gelu: act is GELU instead of the identity.
        """
        return depthwise_conv(x, self.weight, self.bias, residual, gelu=gelu, backend=self.backend)

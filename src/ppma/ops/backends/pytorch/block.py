"""The operations of a block around the attention, composed of PyTorch operations."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ppma.ops.projection_formula import rotate


def conv3x3(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """See `ppma.ops.conv.conv3x3`."""
    images = x.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
    return F.conv2d(images, weight, bias, stride, 1).permute(0, 2, 3, 1)


def depthwise_conv(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gelu: bool) -> Tensor:
    """`residual + conv(act(x)) + bias`; see `ppma.ops.depthwise.depthwise_conv`."""
    values = F.gelu(x) if gelu else x
    out = F.conv2d(values.permute(0, 3, 1, 2), weight, bias, padding=weight.shape[-1] // 2, groups=weight.shape[0])
    return out.permute(0, 2, 3, 1) + (values if residual is None else residual)


def depthwise_linear(
    x: Tensor,
    taps: Tensor,
    offsets: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """`residual + factors * linear(act(x) + conv(act(x)))`; see `ppma.ops.depthwise.depthwise_linear`."""
    return trained_linear(depthwise_conv(x, taps, offsets, None, True), weight, bias, residual, factors)


def trained_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, factors: Tensor | None
) -> Tensor:
    """`residual + factors * linear(x)`; see `ppma.ops.trained_linear.trained_linear`."""
    out = F.linear(x, weight, bias)
    if factors is not None:
        out = out * factors.view(-1, *[1] * (out.ndim - 1))
    return out if residual is None else residual + out


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    norm_eps: float | None,
    rotary: tuple[Tensor, Tensor] | None,
    rotated: int,
    packed: dict[str, Tensor],
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear,
) -> Tensor:
    """`residual + rotate(linear(normalise(x)))`; see `ppma.ops.fused_linear.fused_linear`."""
    out = product(x if norm_eps is None else F.layer_norm(x, x.shape[-1:], eps=norm_eps), weight, bias)
    if rotary is not None:
        cos, sin = (table[:, None] for table in rotary)
        heads = out[:, :rotated].unflatten(-1, (-1, 2 * cos.shape[-1])).unflatten(0, (-1, len(cos)))
        out = torch.cat((rotate(heads, cos, sin).flatten(0, 1).flatten(1), out[:, rotated:]), -1)
    return out if residual is None else residual + out


def fused_conv(x: Tensor, weight: Tensor, bias: Tensor, stride: int, gelu: bool, packed: dict[str, Tensor]) -> Tensor:
    """`act(conv(x) + bias)`; see `ppma.ops.fused_conv.fused_conv`."""
    out = conv3x3(x, weight, bias, stride)
    return F.gelu(out) if gelu else out

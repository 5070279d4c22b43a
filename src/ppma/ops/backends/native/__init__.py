"""The native backend: fused C++ kernels for CPU tensors in float32, in a plain shared library called through ctypes."""

import torch

from ppma.ops.backends.native import library
from ppma.ops.backends.native.attention import polyline_attention, polyline_attention_backward
from ppma.ops.backends.native.conv import conv3x3
from ppma.ops.backends.native.criss_cross import criss_cross_attention, criss_cross_attention_backward
from ppma.ops.backends.native.decay_head import decay_head
from ppma.ops.backends.native.depthwise import depthwise_conv, depthwise_linear
from ppma.ops.backends.native.fused_conv import fused_conv
from ppma.ops.backends.native.fused_layers import fused_layers
from ppma.ops.backends.native.fused_linear import fused_linear
from ppma.ops.backends.native.linear import linear_attention, linear_attention_backward
from ppma.ops.backends.native.projection import project
from ppma.ops.backends.native.rotary import rotary_split
from ppma.ops.backends.native.scan import polyline_scan, polyline_scan_backward
from ppma.ops.backends.native.trained_linear import trained_linear

__all__ = [
    "conv3x3",
    "criss_cross_attention",
    "criss_cross_attention_backward",
    "decay_head",
    "depthwise_conv",
    "depthwise_linear",
    "fused_conv",
    "fused_layers",
    "fused_linear",
    "linear_attention",
    "linear_attention_backward",
    "polyline_attention",
    "polyline_attention_backward",
    "polyline_scan",
    "polyline_scan_backward",
    "project",
    "rotary_split",
    "trained_linear",
    "unsupported_reason",
]


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """None for float32 on the CPU, if the library was built."""
    if device.type != "cpu":
        return "the native kernels run on the CPU"
    if dtype != torch.float32:
        return "the native kernels compute in float32"
    return library.unsupported_reason()

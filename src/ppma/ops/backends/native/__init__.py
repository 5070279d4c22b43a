"""The native backend: fused C++ kernels for CPU tensors in float32, in a plain shared library called through ctypes."""

import torch

from ppma.ops.backends.native import library
from ppma.ops.backends.native.attention import attention, attention_backward
from ppma.ops.backends.native.criss_cross import criss_cross, criss_cross_backward
from ppma.ops.backends.native.depthwise import depthwise_add, depthwise_add_backward
from ppma.ops.backends.native.linear import linear, linear_backward
from ppma.ops.backends.native.rotary import rotate
from ppma.ops.backends.native.scan import scan, scan_backward

__all__ = [
    "attention",
    "attention_backward",
    "criss_cross",
    "criss_cross_backward",
    "depthwise_add",
    "depthwise_add_backward",
    "linear",
    "linear_backward",
    "rotate",
    "scan",
    "scan_backward",
    "why_not",
]


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """It serves float32 on the CPU, where the library was built."""
    if device.type != "cpu":
        return "the native kernels run on the CPU"
    if dtype != torch.float32:
        return "the native kernels compute in float32"
    return library.why_not()

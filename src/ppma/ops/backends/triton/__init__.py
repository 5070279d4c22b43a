"""Fused GPU kernels in Triton, for CUDA and ROCm; on the CPU only in Triton's interpreter (`TRITON_INTERPRET=1`)."""

import re
from functools import cache

import torch
import triton

from ppma.ops.backends.triton.attention import polyline_attention, polyline_attention_backward
from ppma.ops.backends.triton.criss_cross import criss_cross_attention, criss_cross_attention_backward
from ppma.ops.backends.triton.decay_head import decay_head
from ppma.ops.backends.triton.depthwise import depthwise_conv
from ppma.ops.backends.triton.launch import INTERPRETED
from ppma.ops.backends.triton.linear import linear_attention, linear_attention_backward
from ppma.ops.backends.triton.rotary import rotary_split
from ppma.ops.backends.triton.scan import polyline_scan, polyline_scan_backward

__all__ = [
    "criss_cross_attention",
    "criss_cross_attention_backward",
    "decay_head",
    "depthwise_conv",
    "linear_attention",
    "linear_attention_backward",
    "polyline_attention",
    "polyline_attention_backward",
    "polyline_scan",
    "polyline_scan_backward",
    "rotary_split",
    "unsupported_reason",
]

_OLDEST = (3, 3)  # the first Triton whose kernels take NamedTuples
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@cache
def _too_old(version: str) -> bool:
    return tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why such tensors cannot be served, or None."""
    if _too_old(triton.__version__):
        return f"it needs Triton {_OLDEST[0]}.{_OLDEST[1]} or newer, {triton.__version__} is installed"
    if dtype not in _DTYPES:
        return f"its kernels take float16, bfloat16 and float32, not {dtype}"
    if device.type == "cpu":
        return None if INTERPRETED else "it needs a GPU (or TRITON_INTERPRET=1 in the environment, to test)"
    if device.type != "cuda":
        return f"it has no kernels for {device.type}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 or newer"
    return None

"""Fused GPU kernels in Triton, for CUDA and ROCm; on the CPU only in Triton's interpreter (`TRITON_INTERPRET=1`)."""

import torch

from ppma.ops.backends.triton.attention import attention, attention_backward
from ppma.ops.backends.triton.criss_cross import criss_cross, criss_cross_backward
from ppma.ops.backends.triton.launch import INTERPRETED
from ppma.ops.backends.triton.linear import linear, linear_backward
from ppma.ops.backends.triton.scan import scan, scan_backward

__all__ = [
    "attention",
    "attention_backward",
    "criss_cross",
    "criss_cross_backward",
    "linear",
    "linear_backward",
    "scan",
    "scan_backward",
    "why_not",
]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why such tensors cannot be served, or None."""
    if dtype not in _DTYPES:
        return f"its kernels take float16, bfloat16 and float32, not {dtype}"
    if device.type == "cpu":
        return None if INTERPRETED else "it needs a GPU (or TRITON_INTERPRET=1 in the environment, to test)"
    if device.type != "cuda":
        return f"it has no kernels for {device.type}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 or newer"
    return None

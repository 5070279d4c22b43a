"""Plain PyTorch, any device and dtype: the backend that always works."""

import torch

from ppma.ops.backends.pytorch.attention import attention, attention_backward
from ppma.ops.backends.pytorch.criss_cross import criss_cross, criss_cross_backward
from ppma.ops.backends.pytorch.linear import linear, linear_backward
from ppma.ops.backends.pytorch.scan import scan, scan_backward

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


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """It serves everything."""
    return None

"""The PyTorch backend: plain PyTorch operations on any device and dtype."""

import torch

from ppma.ops.backends.pytorch.attention import polyline_attention, polyline_attention_backward
from ppma.ops.backends.pytorch.block import (
    conv3x3,
    depthwise_conv,
    depthwise_linear,
    fused_conv,
    fused_linear,
    trained_linear,
)
from ppma.ops.backends.pytorch.criss_cross import criss_cross_attention, criss_cross_attention_backward
from ppma.ops.backends.pytorch.linear import linear_attention, linear_attention_backward
from ppma.ops.backends.pytorch.scan import polyline_scan, polyline_scan_backward
from ppma.ops.decay_formula import decay_head
from ppma.ops.projection_formula import project, rotary_split

__all__ = [
    "conv3x3",
    "criss_cross_attention",
    "criss_cross_attention_backward",
    "decay_head",
    "depthwise_conv",
    "depthwise_linear",
    "fused_conv",
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
    """None: it supports everything."""
    return None

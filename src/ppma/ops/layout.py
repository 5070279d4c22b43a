"""Conventions that every backend shares: the canonical shapes and their memory layout.

Operators see (B, heads, *grid, channels) and log-decays (B, heads, *grid). Two batch axes, because q, k and v usually
come from one projection of (B, *grid, heads * d), where batch and heads cannot be merged without a copy. Attention
outputs and gradients are laid out (B, *grid, heads, channels), so that merging the heads is a view.
"""

import torch
from torch import Tensor

# Evaluated once, at import: torch.compile of torch 2.6 cannot trace the call.
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "ipu", "mtia", "privateuseone")
_AUTOCAST = frozenset(filter(torch.amp.is_autocast_available, _DEVICES))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half-precision values are computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on this device; None where it is off or not available, as on the meta device."""
    if device.type not in _AUTOCAST or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def heads_last_empty(like: Tensor, channels: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised (B, heads, *grid, channels) on the grid of `like`, laid out (B, *grid, heads, channels).

    A tensor of its own rather than a view of one: forward-mode differentiation restricts views.
    """
    batch, heads, *grid = like.shape[:-1]
    strides = [channels, 1]  # from the last axis back: heads, channels
    step = heads * channels
    for extent in reversed(grid):
        strides.insert(0, step)
        step = step * extent
    *over_grid, over_heads, over_channels = strides
    return torch.empty_strided(
        (batch, heads, *grid, channels),
        (step, over_heads, *over_grid, over_channels),
        dtype=dtype or like.dtype,
        device=like.device,
    )


def heads_last(tensor: Tensor) -> Tensor:
    """The same (B, heads, *grid, channels), laid out (B, *grid, heads, channels)."""
    return tensor.movedim(1, -2).contiguous().movedim(-2, 1)

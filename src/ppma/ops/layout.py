"""Conventions that every backend shares: the canonical shapes, their memory layout, the order of paths.

Operators see (B, heads, *grid, channels) and log-decays (B, heads, *grid). Two batch axes, because q, k and v usually
come from one projection of (B, *grid, heads * d), where batch and heads cannot be merged without a copy. Attention
outputs and gradients lie in memory as (B, *grid, heads, channels), so that merging the heads again is a view.
"""

import torch
from torch import Tensor

# The grid axes are (H, W): scanning the first axis, the columns, first is V2H.
ND_PATHS = {"v2h": "forward", "h2v": "reverse", "2d": "both"}

# Asked once, at import: torch.compile of torch 2.6 cannot trace the question.
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "ipu", "mtia", "privateuseone")
_AUTOCAST = frozenset(filter(torch.amp.is_autocast_available, _DEVICES))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half-precision values are computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast asks for on this device; None where it is off, or unknown as on the meta device."""
    if device.type not in _AUTOCAST or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def heads_last_empty(like: Tensor, channels: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised (B, heads, *grid, channels) on the grid of `like`, laid out (B, *grid, heads, channels)."""
    batch, heads, *grid = like.shape[:-1]
    out = torch.empty((batch, *grid, heads, channels), dtype=dtype or like.dtype, device=like.device)
    return out.movedim(-2, 1)


def axis_orders(paths: str, axes: int) -> list[list[int]]:
    """The axes that each path scans, in order."""
    forward = list(range(axes))
    reverse = forward[::-1]
    return {"forward": [forward], "reverse": [reverse], "both": [forward, reverse]}[paths]


def split_paths(paths: str) -> tuple[str, ...]:
    """The single paths of a 2D mask."""
    return ("v2h", "h2v") if paths == "2d" else (paths,)

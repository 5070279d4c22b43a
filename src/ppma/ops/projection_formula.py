"""The formulas of what stands before an attention, composed of PyTorch operations: `rotary_split` and `project`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ppma.ops.decay_formula import decay_head
from ppma.ops.layout import compute_dtype


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs of x (..., d); computed in float32 or float64, returned in the dtype of x."""
    even, odd = x.to(compute_dtype(x.dtype)).unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return rotated.flatten(-2).to(x.dtype)


def rotary_split(
    packed: Tensor, heads: int, cos: Tensor, sin: Tensor, overwrite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q and k, and v; see `ppma.ops.rotary.rotary_split`."""
    # Not slices, whose gradients would each fill a packed tensor with zeros.
    both, v = packed.unflatten(-1, (3, heads, -1)).split((2, 1), 2)
    q, k = rotate(both, cos[:, None, None], sin[:, None, None]).unbind(2)
    return q, k, v.squeeze(2)


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    heads: int,
    cos: Tensor,
    sin: Tensor,
    decay_weight: Tensor | None,
    decay_bias: Tensor | None,
    rate: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, ...]:
    """q, k, v, v again and the log-decays; see `ppma.ops.projection.project`."""
    q, k, v = rotary_split(F.linear(x, weight, bias), heads, cos, sin, True)
    if decay_weight is None or decay_bias is None:
        return q, k, v, v.view_as(v)
    return q, k, v, v.view_as(v), *decay_head(x, decay_weight, decay_bias, rate, softplus)[1:]

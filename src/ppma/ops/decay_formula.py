"""The formula of the decay heads, composed of PyTorch operations."""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor

from ppma.ops.layout import autocast_dtype, compute_dtype


def decay_head(x: Tensor, weight: Tensor, bias: Tensor, rate: Tensor | None, softplus: bool) -> tuple[Tensor, ...]:
    """Tokens x and `-rate * act(w x + bias)`; see `ppma.ops.decay_head.tapped_decay_head`."""
    dtype = compute_dtype(x.dtype)
    autocast = autocast_dtype(x.device) is not None
    with torch.autocast(x.device.type, enabled=False) if autocast else contextlib.nullcontext():
        slices = x.unflatten(-1, (bias.shape[0], -1)).to(dtype)
        rate = None if rate is None else rate.to(dtype)
        log_decays = log_decays_of(F.linear(slices, weight.to(dtype)), bias.to(dtype), rate, softplus)
        return x, *log_decays.movedim(-2, 1).unbind(-1)


def as_matrix(weight: Tensor, heads: int) -> Tensor:
    """The map (outputs, d) of each head's slice of a token as one matrix, (heads * outputs, heads * d)."""
    outputs, d = weight.shape
    rows = weight.new_zeros(heads, outputs, heads, d)
    rows.diagonal(dim1=0, dim2=2).copy_(weight[..., None].expand(-1, -1, heads))
    return rows.view(heads * outputs, heads * d)


def log_decays_of(logits: Tensor, bias: Tensor, rate: Tensor | None, softplus: bool) -> Tensor:
    """`-rate * act(logits + bias)` of logits (..., heads, outputs)."""
    shifted = logits + bias
    # softplus; the gradient of F.softplus has other strides in a captured graph than where it runs
    value = torch.logaddexp(shifted, torch.zeros_like(shifted)) if softplus else torch.relu(shifted)
    return -value if rate is None else -rate * value

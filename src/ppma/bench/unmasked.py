"""Baselines: PyTorch attention without a mask. The decays are accepted and ignored."""

import torch.nn.functional as F
from torch import Tensor


def without_mask(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    """Full attention, q, k, v (B, heads, H, W, d)."""
    return F.scaled_dot_product_attention(q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)).unflatten(2, v.shape[2:4])


def lines_without_mask(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    """Criss-cross attention, columns then rows plus rows then columns; q, k, v (B, heads, H, W, d)."""

    def rows(x: Tensor) -> Tensor:
        return _within_rows(q, k, x)

    def columns(x: Tensor) -> Tensor:
        return _within_rows(*(tensor.transpose(2, 3) for tensor in (q, k, x))).transpose(2, 3)

    return rows(columns(v)) + columns(rows(v))


def _within_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Four axes, (B * rows, heads, W, channels): with five, PyTorch's fused kernels do not run."""
    batch, _, height, *_ = v.shape
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).unflatten(0, (batch, height)).transpose(1, 2)

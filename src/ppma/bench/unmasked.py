"""Baselines: PyTorch attention without a mask. The decays are accepted and ignored."""

import torch.nn.functional as F
from torch import Tensor


def without_mask(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    """Full attention, q, k, v (B, heads, H, W, d)."""
    return F.scaled_dot_product_attention(q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)).unflatten(2, v.shape[2:4])


def lines_without_mask(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    """Criss-cross attention, columns then rows plus rows then columns; q, k, v (B, heads, H, W, d)."""

    def rows(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, x)

    def columns(x: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q.transpose(2, 3), k.transpose(2, 3), x.transpose(2, 3))
        return out.transpose(2, 3)

    return rows(columns(v)) + columns(rows(v))

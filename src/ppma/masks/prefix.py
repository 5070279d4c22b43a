"""Tokens before the grid, such as a class token, which no mask touches."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ppma.masks.base import StructuredMask
from ppma.ops.options import BackendName, Combine
from ppma.ops.padding import zero_invalid


class PrefixedMask(StructuredMask):
    """A mask over `prefix` tokens followed by the tokens of a grid; each path is 1 to and from the prefix.

    q, k and v are given as a grid of one row, (B, heads, 1, prefix + H*W, d).
    """

    def __init__(self, mask: StructuredMask, prefix: int, grid: tuple[int, int]) -> None:
        self.mask, self.prefix, self.grid, self.paths = mask, prefix, grid, mask.paths

    def dense(self) -> Tensor:
        """Log mask, (paths, ..., prefix + H*W, prefix + H*W)."""
        return F.pad(self.mask.dense(), (self.prefix, 0, self.prefix, 0))

    def rows(self) -> Tensor:
        raise NotImplementedError("tokens before the grid are in no row")

    def columns(self) -> Tensor:
        raise NotImplementedError("tokens before the grid are in no column")

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        combine: Combine = "hadamard",
        scale: float | None = None,
        valid: Tensor | None = None,
        backend: BackendName = "auto",
    ) -> Tensor:
        """Full attention; "hadamard" without N x N tensors, "logit" by the dense form.

        A mask after the softmax lets the keys be taken apart: a query on the grid gives a share of its softmax to the
        grid and the rest to the prefix, and what it reads there is a softmax over those keys alone. Inside the softmax
        the shares depend on the mask. `valid` is (B, 1, prefix + H*W); the prefix is always valid.
        """
        if combine != "hadamard":
            return super().attention(q, k, v, combine=combine, scale=scale, valid=valid, backend=backend)
        k, v = zero_invalid(k, valid), zero_invalid(v, valid)
        q, k, v = (tensor.squeeze(-3) for tensor in (q, k, v))
        to_keys = partial(
            F.scaled_dot_product_attention, attn_mask=None if valid is None else valid[..., None, :], scale=scale
        )
        (own_q, grid_q), (own_k, grid_k), (own_v, grid_v) = (
            tensor.tensor_split([self.prefix], dim=-2) for tensor in (q, k, v)
        )
        from_prefix = to_keys(own_q, k, v)
        # Channel 0 marks the keys before the grid, channel 1 those on it.
        marks = k.new_zeros(*k.shape[:-1], max(2, k.shape[-1]))
        marks[..., : self.prefix, 0] = 1.0
        marks[..., self.prefix :, 1] = 1.0
        to_prefix, to_grid = to_keys(grid_q, k, marks)[..., :2].split(1, -1)
        read = F.scaled_dot_product_attention(grid_q, own_k, own_v, scale=scale)
        masked = self.mask.attention(
            *(tensor.unflatten(-2, self.grid) for tensor in (grid_q, grid_k, grid_v)),
            combine=combine,
            scale=scale,
            valid=None if valid is None else valid[..., 0, self.prefix :].unflatten(-1, self.grid),
            backend=backend,
        ).flatten(-3, -2)
        paths = len(self.paths)
        out = torch.cat((paths * from_prefix, to_grid * masked + paths * to_prefix * read), -2)
        return out.unsqueeze(-3)

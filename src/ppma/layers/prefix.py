"""Tokens that stand before the grid, such as a class token, and that no mask touches."""

import torch.nn.functional as F
from torch import Tensor

from ppma.masks import StructuredMask


class PrefixedMask(StructuredMask):
    """A mask over `prefix` tokens followed by the tokens of a grid; each path is 1 to and from the prefix.

    q, k and v are given as a grid of one row, (B, heads, 1, prefix + H*W, d).
    """

    def __init__(self, mask: StructuredMask, prefix: int) -> None:
        self.mask, self.prefix, self.paths = mask, prefix, mask.paths

    def dense(self) -> Tensor:
        """Log mask, (paths, ..., prefix + H*W, prefix + H*W)."""
        return F.pad(self.mask.dense(), (self.prefix, 0, self.prefix, 0))

    def rows(self) -> Tensor:
        raise NotImplementedError("tokens before the grid lie in no row")

    def columns(self) -> Tensor:
        raise NotImplementedError("tokens before the grid lie in no column")

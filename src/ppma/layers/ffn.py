"""The feed-forward half of a block."""

from torch import Tensor, nn

from ppma.layers.convolution import DepthwiseConv
from ppma.layers.init import linear
from ppma.layers.recompute import recomputing


class ConvFeedForward(nn.Module):
    """Linear, GELU, plus a 3x3 depthwise convolution of itself, linear; on (B, H, W, dim)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.expand = linear(dim, hidden)
        self.local = DepthwiseConv(hidden, 3)
        self.reduce = linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.expand(x)
        mixed = self.local.plus(hidden, gelu=True)
        with recomputing(mixed, lambda: self.local.plus(hidden, gelu=True)):
            return self.reduce(mixed)

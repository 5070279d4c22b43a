"""The feed-forward half of a block."""

from torch import Tensor, nn

from ppma.layers.convolution import depthwise
from ppma.layers.init import linear


class ConvFeedForward(nn.Module):
    """Linear, GELU, plus a 3x3 depthwise convolution of itself, linear; on (B, H, W, dim)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.expand = linear(dim, hidden)
        self.act = nn.GELU()
        self.local = depthwise(hidden, 3)
        self.reduce = linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.expand(x))
        return self.reduce(hidden + self.local(hidden))

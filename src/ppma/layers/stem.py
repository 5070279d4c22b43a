"""Image to tokens, and tokens to a coarser grid."""

from torch import Tensor, nn

from ppma.layers.chain import Chain
from ppma.layers.convolution import ChannelLastBatchNorm, Conv3x3


class Stem(nn.Module):
    """Image to tokens by four 3x3 convolutions, each with batch norm, GELU between.

    Args:
        in_chans: channels of the image.
        dim: channels of a token.
        stride: 4, or 2 for small images.

    Examples:
        >>> import torch
        >>> from ppma.layers import Stem
        >>> Stem(3, 16)(torch.randn(2, 3, 32, 30)).shape
        torch.Size([2, 8, 8, 16])
    """

    def __init__(self, in_chans: int, dim: int, stride: int = 4) -> None:
        super().__init__()
        half = dim // 2
        layers: list[nn.Module] = []
        for inputs, outputs, step in (
            (in_chans, half, 2),
            (half, half, 1),
            (half, dim, stride // 2),
            (dim, dim, 1),
        ):
            if layers:
                layers.append(nn.GELU())
            layers.append(Conv3x3(inputs, outputs, step))
            layers.append(ChannelLastBatchNorm(outputs))
        self.layers = nn.Sequential(*layers)

    def forward(self, image: Tensor) -> Tensor:
        """(B, in_chans, height, width) to (B, height / stride, width / stride, dim), rounded up."""
        return self.layers(image.permute(0, 2, 3, 1))


class Downsample(Chain):
    """Half the grid in each direction, rounded up: a 3x3 convolution with stride 2 and batch norm.

    Args:
        inputs: channels of the finer grid.
        outputs: channels of the coarser grid.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = Conv3x3(inputs, outputs, 2)
        self.norm = ChannelLastBatchNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, inputs) to (B, ceil(H / 2), ceil(W / 2), outputs)."""
        return self.norm(self.conv(x))

    def parts(self) -> tuple[nn.Module, ...]:
        """As `Chain.parts`."""
        return self.conv, self.norm

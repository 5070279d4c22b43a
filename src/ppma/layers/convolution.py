"""Convolutions on channel-last tensors.

A contiguous (B, H, W, C) tensor, permuted, is exactly what PyTorch calls channels-last memory, so the convolutions
below read and write the layout of the attention without a copy.
"""

from torch import Tensor, nn


class ChannelLastConv(nn.Conv2d):
    """A 2D convolution, (B, H, W, in) to (B, H', W', out)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class ChannelLastBatchNorm(nn.BatchNorm2d):
    """Batch norm over the last axis of (B, H, W, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def depthwise(dim: int, kernel: int) -> ChannelLastConv:
    """A depthwise convolution that keeps the grid."""
    return ChannelLastConv(dim, dim, kernel, padding=kernel // 2, groups=dim)

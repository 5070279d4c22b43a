"""Rotary embeddings: channel pairs (2m, 2m+1) are rotated by the token's raster index times the m-th frequency."""

import torch
from torch import Tensor

from ppma.layers.constants import cached_constant


def rotary_frequencies(head_dim: int, device: torch.device | None = None) -> Tensor:
    """10000^-linspace(0, 1, d/2), one for each channel pair: (head_dim / 2,), float32 as in the release."""
    return 1.0 / (10000.0 ** torch.linspace(0, 1, head_dim // 2, dtype=torch.float32, device=device))


@cached_constant
def rotary_table(height: int, width: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every token's angles, in float32.

    Args:
        height: rows of the grid.
        width: columns of the grid.
        head_dim: channels of a head, even.
        device: of the table.

    Returns:
        Two (H * W, head_dim / 2) tensors.

    Examples:
        >>> import torch
        >>> from ppma.layers import rotary_table
        >>> cos, sin = rotary_table(8, 6, 32, torch.device("cpu"))
        >>> cos.shape
        torch.Size([48, 16])
    """
    position = torch.arange(height * width, device=device, dtype=torch.float32)
    angle = position[:, None] * rotary_frequencies(head_dim, device)
    return angle.cos(), angle.sin()

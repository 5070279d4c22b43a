"""Rotary embeddings: channel pairs (2m, 2m+1) of q and k are rotated by angles that depend on the token."""

from torch import Tensor

from ppma.ops import backends
from ppma.ops.options import BackendName


def rotary_split(
    packed: Tensor, heads: int, cos: Tensor, sin: Tensor, *, overwrite: bool = False, backend: BackendName = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection into q, k and v, with q and k rotated.

    Args:
        packed: (B, N, 3 * heads * d), q before k before v.
        heads: attention heads.
        cos: (N, d / 2).
        sin: (N, d / 2).
        overwrite: q and k may be rotated in place, because the packed values will not be needed.
        backend: selects the implementation.

    Returns:
        Three tensors (B, N, heads, d).

    Examples:
        >>> import torch
        >>> from ppma.ops.rotary import rotary_split
        >>> angles = torch.rand(30, 4)
        >>> q, k, v = rotary_split(torch.randn(2, 30, 3 * 4 * 8), 4, angles.cos(), angles.sin())
        >>> q.shape
        torch.Size([2, 30, 4, 8])
    """
    return backends.compose(backend, "rotary_split", packed, heads, cos, sin, overwrite)

"""Depthwise convolution of channel-last tokens, fused with the activation before it and the sum after it."""

from torch import Tensor

from ppma.ops import backends
from ppma.ops.options import BackendName


def depthwise_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    *,
    gelu: bool = False,
    backend: BackendName = "auto",
) -> Tensor:
    """`residual + conv(act(x)) + bias`, with a convolution that keeps the size.

    Args:
        x: (B, H, W, C).
        weight: (C, 1, k, k) with k odd.
        bias: (C,) or None.
        residual: (B, H, W, C), or None for act(x) itself.
        gelu: act is GELU instead of the identity.
        backend: selects the implementation; "native" and "triton" have kernels for 3x3 and 5x5.

    Returns:
        (B, H, W, C).

    Examples:
        >>> import torch
        >>> from ppma.ops.depthwise import depthwise_conv
        >>> depthwise_conv(torch.ones(1, 3, 3, 1), torch.ones(1, 1, 3, 3), None, gelu=False).squeeze()
        tensor([[ 5.,  7.,  5.],
                [ 7., 10.,  7.],
                [ 5.,  7.,  5.]])
    """
    return backends.compose(backend, "depthwise_conv", x, weight, bias, residual, gelu)

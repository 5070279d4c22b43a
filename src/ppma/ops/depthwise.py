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


def depthwise_linear(
    x: Tensor,
    taps: Tensor,
    offsets: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    factors: Tensor | None = None,
    *,
    backend: BackendName = "auto",
) -> Tensor:
    """`residual + factors * linear(h)` with `h = depthwise_conv(x, taps, offsets, gelu=True)`, for training.

    With less memory: the native kernels do not keep h for the backward pass, where the convolution's gradient
    computes it again on the way.

    Args:
        x: (B, H, W, C).
        taps: (C, 1, k, k) with k odd; the native backend has a kernel for 3x3.
        offsets: (C,) or None, added to the convolution.
        weight: (outputs, C).
        bias: (outputs,) or None.
        residual: (B, H, W, outputs) or None.
        factors: (B,) or None, as in `trained_linear`.
        backend: selects the implementation.

    Returns:
        (B, H, W, outputs).

    Examples:
        >>> import torch
        >>> from ppma.ops.depthwise import depthwise_linear
        >>> depthwise_linear(torch.ones(1, 2, 2, 4), torch.zeros(4, 1, 3, 3), None, torch.ones(3, 4), None).shape
        torch.Size([1, 2, 2, 3])
    """
    return backends.compose(backend, "depthwise_linear", x, taps, offsets, weight, bias, residual, factors)

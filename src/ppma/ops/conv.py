"""A 3x3 convolution of channel-last tensors whose gradient has a kernel."""

import torch
from torch import Tensor

from ppma.ops import backends
from ppma.ops.options import BackendName


def conv3x3(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int = 1, backend: BackendName = "auto"
) -> Tensor:
    """`conv(x) + bias`, with a border of one zero.

    Args:
        x: (B, H, W, inputs).
        weight: (outputs, inputs, 3, 3).
        bias: (outputs,) or None.
        stride: 1 or 2.
        backend: selects the implementation; "native" has kernels for the gradients of weight and bias, where the
            weight is trained, and with enough channels for the output and, with stride 1, for the gradient of x.

    Returns:
        (B, H / stride, W / stride, outputs), rounded up.

    Examples:
        >>> import torch
        >>> from ppma.ops.conv import conv3x3
        >>> conv3x3(torch.ones(1, 3, 3, 1), torch.ones(1, 1, 3, 3), None, stride=2).squeeze()
        tensor([[4., 4.],
                [4., 4.]])
    """
    # Half precision stays PyTorch's: the dispatcher would widen it for a kernel that only gradients have.
    if backend == "auto" and x.dtype in (torch.float16, torch.bfloat16):
        backend = "torch"
    return backends.compose(backend, "conv3x3", x, weight, bias, stride)

"""A linear layer together with what stands behind it in a residual branch, for training."""

import torch
from torch import Tensor

from ppma.ops import backends
from ppma.ops.options import BackendName


def trained_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    factors: Tensor | None = None,
    *,
    backend: BackendName = "auto",
) -> Tensor:
    """`residual + factors * linear(x)`.

    Args:
        x: (B, ..., inputs).
        weight: (outputs, inputs).
        bias: (outputs,) or None.
        residual: (B, ..., outputs) or None.
        factors: (B,), what each image counts, as stochastic depth draws it: 0 or a common number; 1 if None. It has
            no gradient.
        backend: selects the implementation; "native" packs the weight in every call and leaves out images that count 0,
            forward and backward.

    Returns:
        (B, ..., outputs).

    Examples:
        >>> import torch
        >>> from ppma.ops.trained_linear import trained_linear
        >>> trained_linear(torch.ones(2, 5, 4), torch.ones(3, 4), None, factors=torch.tensor([0.0, 2.0]))[:, 0]
        tensor([[0., 0., 0.],
                [8., 8., 8.]])
    """
    # Half precision stays PyTorch's: the dispatcher would widen it for a product that a library has too.
    if backend == "auto" and x.dtype in (torch.float16, torch.bfloat16):
        backend = "torch"
    return backends.compose(backend, "trained_linear", x, weight, bias, residual, factors)

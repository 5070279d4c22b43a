"""Log-decays of every token and head from a token's channels."""

import torch
from torch import Tensor

from ppma.ops import backends
from ppma.ops.options import BackendName


def decay_head(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    rate: Tensor | None = None,
    *,
    softplus: bool = False,
    backend: BackendName = "auto",
) -> tuple[Tensor, ...]:
    """`-rate * act(w x + bias)` for each head's slice of a token, with one linear map for all heads.

    Args:
        x: (B, N, heads * d).
        weight: (outputs, d).
        bias: (heads, outputs).
        rate: (heads, outputs), or None for 1.
        softplus: act is softplus instead of ReLU.
        backend: selects the implementation; "triton" and, in float32, "native" have kernels.

    Returns:
        For each output (B, heads, N), in float32 or, for float64 values, float64.

    Examples:
        >>> import torch
        >>> from ppma.ops.decay_head import decay_head
        >>> log_alpha, log_beta = decay_head(torch.ones(1, 5, 6), torch.ones(2, 3), torch.zeros(2, 2))
        >>> log_alpha.shape, log_alpha[0, 0, 0].item()
        (torch.Size([1, 2, 5]), -3.0)
    """
    return tapped_decay_head(x, weight, bias, rate, softplus=softplus, backend=backend)[1]


def tapped_decay_head(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    rate: Tensor | None = None,
    *,
    softplus: bool = False,
    backend: BackendName = "auto",
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The tokens x for their other readers, and their `decay_head`.

    Where the kernel runs, it adds its gradient to the one that those readers send back. If they read the x that was
    passed in, autograd would add the two in a pass of its own.
    """
    # On the CPU the dispatcher would widen half precision for the kernel, and narrow the log-decays.
    if x.is_cpu and x.dtype in (torch.float16, torch.bfloat16) and backend in ("auto", "native"):
        backend = "torch"
    tapped, *log_decays = backends.compose(backend, "decay_head", x, weight, bias, rate, softplus)
    return tapped, tuple(log_decays)

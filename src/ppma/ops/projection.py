"""What an attention computes of its tokens before it attends, for training: q, k, v and the log-decays."""

from typing import NamedTuple

import torch
from torch import Tensor

from ppma.ops import backends
from ppma.ops.options import BackendName


class Projected(NamedTuple):
    """Inputs of an attention.

    Attributes:
        q: (B, N, heads, d), rotated.
        k: like q.
        v: (B, N, heads, d).
        values: v for another reader, whose gradient then needs no pass over memory to be added.
        log_decays: (B, heads, N) for each output of the decay head; () without one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    values: Tensor
    log_decays: tuple[Tensor, ...]


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    heads: int,
    rotary: tuple[Tensor, Tensor],
    decay: tuple[Tensor, Tensor, Tensor | None, bool] | None = None,
    *,
    backend: BackendName = "auto",
) -> Projected:
    """`rotary_split` of a linear layer of x, and `decay_head` of x.

    Args:
        x: (B, N, heads * d).
        weight: (3 * heads * d, heads * d), of q, k and v.
        bias: (3 * heads * d,).
        heads: attention heads.
        rotary: cosines and sines, (N, d / 2) each.
        decay: weight, bias, rate and activation as `decay_head` takes them; None for no log-decays.
        backend: selects the implementation; "native" makes one product of all, forward and backward.

    Examples:
        >>> import torch
        >>> from ppma.ops.projection import project
        >>> angles = torch.rand(30, 4)
        >>> tokens, weight, bias = torch.randn(2, 30, 16), torch.randn(48, 16), torch.zeros(48)
        >>> decay = torch.zeros(1, 8), torch.ones(2, 1), None, False
        >>> q, k, v, _, (log_decay,) = project(tokens, weight, bias, 2, (angles.cos(), angles.sin()), decay)
        >>> q.shape, log_decay.shape, log_decay[0, 0, 0].item()
        (torch.Size([2, 30, 2, 8]), torch.Size([2, 2, 30]), -1.0)
    """
    # On the CPU the dispatcher would widen half precision for the kernel, and narrow the log-decays.
    if x.is_cpu and x.dtype in (torch.float16, torch.bfloat16) and backend in ("auto", "native"):
        backend = "torch"
    of_decay = (None, None, None, False) if decay is None else decay
    q, k, v, values, *log_decays = backends.compose(backend, "project", x, weight, bias, heads, *rotary, *of_decay)
    return Projected(q, k, v, values, tuple(log_decays))

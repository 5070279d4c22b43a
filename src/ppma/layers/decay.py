"""Decay heads: from a token's channels to the logarithms of its decays.

Both apply one small linear map, shared by the heads, to each head's slice of the token; they differ in the activation:
`relu` is the paper's exp(-relu(.)), `softplus` the parametrisation of the authors' release. Log-decays are computed in
float32 at least, also under autocast: they are summed along paths.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from ppma.ops.backends.pytorch.block import log_decays_of
from ppma.ops.decay_head import decay_head
from ppma.ops.layout import compute_dtype
from ppma.ops.options import BackendName

# Decays start at exp(-a * dt) with a uniform and dt log-uniform in these ranges, in both heads.
START_A = (1.0, 1.1)
START_DT = (1e-3, 1e-1)


def _start(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Random a and dt."""
    a = torch.empty(shape).uniform_(*START_A)
    dt = torch.empty(shape).uniform_(*map(math.log, START_DT)).exp()
    return a, dt


class DecayHead(nn.Module, ABC):
    """Log-decays of every token and head.

    Args:
        dim: channels of a token.
        heads: attention heads; each reads dim / heads channels.
        outputs: 2 for separate alpha and beta, 1 where they are shared.

    Examples:
        >>> import torch
        >>> from ppma.layers import SoftplusDecay
        >>> log_alpha, log_beta = SoftplusDecay(64, heads=4)(torch.randn(2, 8, 6, 64))
        >>> log_alpha.shape, bool((log_beta <= 0).all())
        (torch.Size([2, 4, 8, 6]), True)
    """

    def __init__(self, dim: int, heads: int, outputs: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(outputs, dim // heads))

    @abstractmethod
    def terms(self) -> tuple[Tensor, Tensor | None, bool]:
        """Bias and rate, (heads, outputs) each, and whether the activation is softplus: as `decay_head` takes them."""

    def forward(self, x: Tensor, backend: BackendName = "auto") -> tuple[Tensor, Tensor]:
        """`x` (B, *grid, dim) to log_alpha and log_beta, (B, heads, *grid) each, in float32 or float64."""
        bias, rate, softplus = self.terms()
        # The grid is one axis here: with symbolic sizes, export cannot split it off the heads again.
        found = decay_head(x.flatten(1, -2), self.weight, bias, rate, softplus=softplus, backend=backend)
        log_decays = [log_decay.unflatten(-1, x.shape[1:-1]) for log_decay in found]
        return log_decays[0], log_decays[-1]

    def from_logits(self, logits: Tensor, grid: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits (B, tokens, heads, outputs) of a grid to log_alpha and log_beta."""
        bias, rate, softplus = self.terms()
        rate = None if rate is None else rate.to(logits.dtype)
        log_decays = log_decays_of(logits, bias.to(logits.dtype), rate, softplus).unflatten(1, grid).movedim(-2, 1)
        return log_decays[..., 0], log_decays[..., -1]


class ReluDecay(DecayHead):
    """The paper's head: `log decay = -relu(w x + b)`.

    Weights start at 0 and biases, one for each head and output, where the release starts its decays: with random
    weights about half of all tokens would start behind a ReLU without gradient, and the others far outside that range.
    """

    def __init__(self, dim: int, heads: int, outputs: int = 2) -> None:
        super().__init__(dim, heads, outputs)
        nn.init.zeros_(self.weight)
        a, dt = _start((heads, outputs))
        self.bias = nn.Parameter(a * dt)

    def terms(self) -> tuple[Tensor, Tensor | None, bool]:
        return self.bias, None, False


class SoftplusDecay(DecayHead):
    """The release's head: `log decay = -exp(A_log) * softplus(w x + dt_bias)`, A_log and dt_bias for each head."""

    def __init__(self, dim: int, heads: int, outputs: int = 2) -> None:
        super().__init__(dim, heads, outputs)
        trunc_normal_(self.weight, std=0.02)
        a, dt = _start((heads,))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        self.A_log = nn.Parameter(a.log())

    def terms(self) -> tuple[Tensor, Tensor | None, bool]:
        outputs = self.weight.shape[0]
        rate = self.A_log.to(compute_dtype(self.A_log.dtype)).exp()
        return self.dt_bias[:, None].expand(-1, outputs), rate[:, None].expand(-1, outputs), True


class ZeroStartDecay(DecayHead):
    """A head that starts at log-decays of exactly 0: `log decay = -max(rate, 0) * softplus(w x + b)`.

    `rate`, one for each head and output, starts at 0. Its gradient ignores the maximum: with the gradient of a ReLU, a
    rate that once fell below 0 would stay there. `w` and `b` receive gradients as soon as `rate` is positive.
    """

    def __init__(self, dim: int, heads: int, outputs: int = 2) -> None:
        super().__init__(dim, heads, outputs)
        trunc_normal_(self.weight, std=0.02)
        self.bias = nn.Parameter(torch.full((heads, outputs), math.log(math.expm1(1.0))))  # softplus(bias) = 1
        self.rate = nn.Parameter(torch.zeros(heads, outputs))

    def terms(self) -> tuple[Tensor, Tensor | None, bool]:
        return self.bias, self.rate + (self.rate.clamp(min=0) - self.rate).detach(), True


DECAYS: dict[str, type[DecayHead]] = {"relu": ReluDecay, "softplus": SoftplusDecay}

"""Decay heads: from a token's channels to the logarithms of its decays.

Both apply one small linear map, shared by the heads, to each head's slice of the token; they differ in the activation:
`relu` is the paper's exp(-relu(.)), `softplus` the parametrisation of the authors' release. Log-decays are computed in
float32 at least, also under autocast: they are summed along paths.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from ppma.ops import checks
from ppma.ops.decay_formula import log_decays_of
from ppma.ops.decay_head import tapped_decay_head
from ppma.ops.layout import compute_dtype
from ppma.ops.options import BackendName

STARTS = ("release", "strong")
# "release": decays start at exp(-a * dt) with a uniform and dt log-uniform in these ranges, in both heads.
RELEASE_A = (1.0, 1.1)
RELEASE_DT = (1e-3, 1e-1)


class DecayStart(NamedTuple):
    """Where the decays of a head start.

    Attributes:
        low: smallest decay of a token whose channels are all 0; in (0, 1).
        high: largest such decay. Each head has its own, with a log-decay that is log-uniform between the two.
        weight_std: standard deviation of the weights, by which decays differ between tokens.
    """

    low: float
    high: float
    weight_std: float


Start = str | tuple[float, float, float]  # a name of STARTS, or a DecayStart


def check_start(name: str, start: object) -> None:
    """Check a value of `decay_start`; `name` is for messages."""
    if isinstance(start, str):
        checks.one_of(name, start, STARTS)
        return
    numbers = list(start) if isinstance(start, list | tuple) else []
    valid = len(numbers) == 3 and all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)
    if not valid or not 0 < numbers[0] <= numbers[1] < 1 or not 0 <= numbers[2] <= 100:
        raise ValueError(
            f"{name}: expected one of {', '.join(STARTS)}, or (low, high, weight_std) with decays 0 < low <= high < 1 "
            f"and weight_std >= 0, got {start!r}"
        )


def _release_start(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Random a and dt, as the authors draw them."""
    a = torch.empty(shape).uniform_(*RELEASE_A)
    dt = torch.empty(shape).uniform_(*map(math.log, RELEASE_DT)).exp()
    return a, dt


class DecayHead(nn.Module, ABC):
    """Log-decays of every token and head.

    Args:
        dim: channels of a token.
        heads: attention heads; each reads dim / heads channels.
        outputs: 2 for separate alpha and beta, 1 where they are shared.
        start: where decays start: "release", decays of 0.9 to 0.999 that hardly differ between tokens, as the authors
            train; "strong", decays small and different enough to mask tokens from the first step on, which are
            learned in far fewer steps; or the three numbers of a `DecayStart`.

    Attributes:
        strong: what "strong" stands for.

    Examples:
        >>> import torch
        >>> from ppma.layers import SoftplusDecay
        >>> log_alpha, log_beta = SoftplusDecay(64, heads=4)(torch.randn(2, 8, 6, 64))
        >>> log_alpha.shape, bool((log_beta <= 0).all())
        (torch.Size([2, 4, 8, 6]), True)
    """

    strong: ClassVar[DecayStart]
    is_decay_head = True  # by which `ppma.parameter_groups` recognises one

    def __init__(self, dim: int, heads: int, outputs: int = 2, start: Start = "release") -> None:
        super().__init__()
        check_start("start", start)
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(outputs, dim // heads))
        self._initialise(None if start == "release" else self.strong if start == "strong" else DecayStart(*start))

    @abstractmethod
    def _initialise(self, start: DecayStart | None) -> None:
        """Set `weight` and add the other parameters; None for the start of the release."""

    def _initial_rates(self, start: DecayStart, shape: tuple[int, ...]) -> Tensor:
        """Initialise the weights, and draw minus the log-decays of zero tokens."""
        nn.init.normal_(self.weight, std=start.weight_std)
        least, most = (math.log(-math.log(decay)) for decay in (start.high, start.low))
        return torch.empty(shape).uniform_(least, most).exp()

    @abstractmethod
    def terms(self) -> tuple[Tensor, Tensor | None, bool]:
        """Bias and rate, (heads, outputs) each, and whether the activation is softplus: as `decay_head` takes them."""

    def forward(self, x: Tensor, backend: BackendName = "auto", tapped: bool = False) -> tuple[Tensor, ...]:
        """Log-decays of tokens.

        Args:
            x: (B, *grid, dim).
            backend: selects the implementation.
            tapped: also return the tokens (B, N, dim), first, for their other readers; see `tapped_decay_head`.

        Returns:
            log_alpha and log_beta, (B, heads, *grid) each, in float32 or float64.
        """
        bias, rate, softplus = self.terms()
        # The grid is one axis here: with symbolic sizes, export cannot split it off the heads again.
        tokens, found = tapped_decay_head(x.flatten(1, -2), self.weight, bias, rate, softplus=softplus, backend=backend)
        log_decays = found[0].unflatten(-1, x.shape[1:-1]), found[-1].unflatten(-1, x.shape[1:-1])
        return (tokens, *log_decays) if tapped else log_decays

    def from_logits(self, logits: Tensor, grid: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits (B, tokens, heads, outputs) of a grid to log_alpha and log_beta."""
        bias, rate, softplus = self.terms()
        rate = None if rate is None else rate.to(logits.dtype)
        log_decays = log_decays_of(logits, bias.to(logits.dtype), rate, softplus).unflatten(1, grid).movedim(-2, 1)
        return log_decays[..., 0], log_decays[..., -1]


class ReluDecay(DecayHead):
    """The paper's head: `log decay = -relu(w x + b)`, b for each head and output.

    With the start "release" the weights are 0: with biases that small, random weights would put about half of all
    tokens behind a ReLU without gradient, and the others far outside the range of decays.
    """

    strong = DecayStart(math.exp(-1), math.exp(-1), 0.3)

    def _initialise(self, start: DecayStart | None) -> None:
        shape = (self.heads, len(self.weight))
        if start is None:
            nn.init.zeros_(self.weight)
            a, dt = _release_start(shape)
            self.bias = nn.Parameter(a * dt)
        else:
            self.bias = nn.Parameter(self._initial_rates(start, shape))

    def terms(self) -> tuple[Tensor, Tensor | None, bool]:
        return self.bias, None, False


class SoftplusDecay(DecayHead):
    """The release's head: `log decay = -exp(A_log) * softplus(w x + dt_bias)`, A_log and dt_bias for each head."""

    strong = DecayStart(math.exp(-0.3), math.exp(-0.3), 0.3)

    def _initialise(self, start: DecayStart | None) -> None:
        if start is None:
            trunc_normal_(self.weight, std=0.02)
            a, dt = _release_start((self.heads,))
        else:
            dt = self._initial_rates(start, (self.heads,))
            a = torch.ones_like(dt)
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

    def _initialise(self, start: DecayStart | None) -> None:
        shape = (self.heads, len(self.weight))
        trunc_normal_(self.weight, std=0.02)
        self.bias = nn.Parameter(torch.full(shape, math.log(math.expm1(1.0))))  # softplus(bias) = 1
        self.rate = nn.Parameter(torch.zeros(shape))

    def terms(self) -> tuple[Tensor, Tensor | None, bool]:
        return self.bias, self.rate + (self.rate.clamp(min=0) - self.rate).detach(), True


DECAYS: dict[str, type[DecayHead]] = {"relu": ReluDecay, "softplus": SoftplusDecay}

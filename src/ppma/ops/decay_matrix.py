"""One grid line at a time: log-decays to decay matrices, and their gradient back to log-decays.

A line of n tokens has n log-decays, one for the edge before each token; the first lies outside the line.
Its decay matrix is ``D[j, l] = product of decay[m], m = min(j, l)+1 .. max(j, l)``, symmetric with diagonal 1.
"""

import torch
from torch import Tensor

# exp of anything below is 0 in every floating-point type. Such an edge is a cut: it is counted, not summed,
# because adding it to a running sum would drown the ordinary decays that follow it.
CUT_BELOW = -1e4


def wide_dtype(device: torch.device) -> torch.dtype:
    """The type in which potentials are accumulated: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def potentials(line: Tensor) -> tuple[Tensor, Tensor]:
    """Cumulative log-decays along the last axis, and how many cuts (decays of 0) lie before each token.

    Args:
        line: (..., n) log-decays; the first of each line lies outside it and is never read.

    Returns:
        The potential (..., n) in `wide_dtype`, cuts left out, and the number of cuts (..., n).
    """
    outside = torch.arange(line.shape[-1], device=line.device) == 0
    edges = line.to(wide_dtype(line.device)).masked_fill(outside, 0.0)
    cut = edges < CUT_BELOW
    return edges.masked_fill(cut, 0.0).cumsum(-1), cut.cumsum(-1)


def log_differences(potential: Tensor, cuts: Tensor, rank: Tensor) -> Tensor:
    """Log mask between all pairs of the last axis: minus the distance of their potentials, -inf across a cut.

    The sign of a difference comes from the rank of the tokens on the path and not from `abs`, whose gradient is wrong
    at ties (decay 1). Differences are taken in float64, so neither long lines nor decays of 0 lose accuracy.

    Args:
        potential: (..., n).
        cuts: (..., n).
        rank: (..., n) position of each token on the path.

    Returns:
        (..., n, n).
    """
    sign = torch.sign(rank[..., :, None] - rank[..., None, :]).to(potential.dtype)
    difference = (potential[..., :, None] - potential[..., None, :]) * sign
    return difference.masked_fill(cuts[..., :, None] != cuts[..., None, :], -torch.inf)


def log_decay_matrix(log_decay: Tensor, dim: int = -1) -> Tensor:
    """Logarithm of the decay matrix of every line along `dim`. Differentiable by autograd.

    Args:
        log_decay: (..., n, ...) with the line along `dim`.
        dim: the axis of the line.

    Returns:
        (..., n, n, ...): `dim` is replaced by the query and the key position, in `wide_dtype`.
    """
    line = log_decay.movedim(dim, -1)
    rank = torch.arange(line.shape[-1], device=line.device)
    log_matrix = log_differences(*potentials(line), rank)
    dim = dim % log_decay.ndim
    return log_matrix.movedim((-2, -1), (dim, dim + 1))


def log_decay_gradient(grad_log_matrix: Tensor) -> Tensor:
    """Gradient of the log-decays from the gradient of `log_decay_matrix` along the last axis.

    Edge m lies between j and l exactly if min(j, l) < m <= max(j, l); summing those pairs is a reverse
    cumulative sum of what each token's potential receives.

    Args:
        grad_log_matrix: (..., n, n).

    Returns:
        (..., n), with a zero for the edge outside the line.
    """
    wide = wide_dtype(grad_log_matrix.device)
    below = grad_log_matrix.tril(-1)
    above = grad_log_matrix.triu(1)
    potential = below.sum(-1, dtype=wide) - below.sum(-2, dtype=wide)
    potential += above.sum(-2, dtype=wide) - above.sum(-1, dtype=wide)
    log_decay = potential.flip(-1).cumsum(-1).flip(-1)
    log_decay[..., 0] = 0.0
    return log_decay


def log_sum(a: Tensor, b: Tensor) -> Tensor:
    """log(exp(a) + exp(b)), with gradient 0 instead of NaN where both are -inf."""
    nothing = torch.maximum(a, b) == -torch.inf
    total = torch.logaddexp(a.masked_fill(nothing, 0.0), b.masked_fill(nothing, 0.0))
    return total.masked_fill(nothing, -torch.inf)

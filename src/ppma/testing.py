"""Inputs and error budgets for testing an implementation of the operators against the float64 reference.

A budget is derived, not chosen: the exact function is run in float64 on inputs whose every entry is off by one rounding
of the working precision. What that changes is the least that any implementation in that precision may be wrong by; an
implementation that rounds `roundings` times on the way to a result may be wrong by that many times as much.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Function = Callable[..., Tensor]

# 1 x 1, single lines, odd, even, rectangular both ways.
GRIDS = [(1, 1), (1, 6), (7, 1), (3, 5), (6, 4), (5, 5)]


def random_log_decay(*shape: int, generator: torch.Generator | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Log-decays with every hard case among them: a sixth each exactly 0 and exactly 1, some tiny, the rest random."""
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    kind = torch.rand(shape, generator=generator, dtype=torch.float64)
    log_decay = -2 * uniform
    log_decay[kind < 0.45] = -60.0
    log_decay[kind < 0.40] = 0.0
    log_decay[kind < 0.20] = -torch.inf
    keep = torch.rand(shape, generator=generator, dtype=torch.float64) < 0.2
    log_decay[keep] = -2 * uniform[keep]
    return log_decay.to(dtype or torch.float32)


def outputs_and_gradients(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output of `function` and the gradient of each input, for a fixed random cotangent."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients = torch.autograd.grad(out, leaves, cotangent.to(out))
    return [out.detach(), *gradients]


def error_budget(exact: Function, inputs: Sequence[Tensor], dtype: torch.dtype, roundings: int) -> list[float]:
    """The largest error allowed for the output and for the gradient of each input.

    Args:
        exact: the function in float64.
        inputs: its inputs; floating-point values as the implementation gets them.
        dtype: the working precision (of the values; decays are float32 at least).
        roundings: how many roundings may add up on the way to one result.

    Returns:
        One absolute bound for the output and one for each gradient.
    """
    generator = torch.Generator().manual_seed(1)
    wide = [tensor.double() for tensor in inputs]
    base = outputs_and_gradients(exact, wide)
    worst = [torch.finfo(dtype).eps * tensor.abs().max().item() for tensor in base]
    for _ in range(3):
        moved = []
        for tensor, given in zip(wide, inputs, strict=True):
            eps = torch.finfo(given.dtype).eps
            sign = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor) * 2 - 1
            moved.append(tensor * (1 + eps * sign))
        for position, (a, b) in enumerate(zip(outputs_and_gradients(exact, moved), base, strict=True)):
            worst[position] = max(worst[position], (a - b).abs().max().item())
    return [roundings * value for value in worst]


def assert_accurate(
    actual: Function, exact: Function, inputs: Sequence[Tensor], roundings: int, dtype: torch.dtype | None = None
) -> None:
    """Output and gradients of `actual` agree with those of `exact` in float64 within the derived budget.

    Args:
        actual: the implementation under test, called with `inputs`.
        exact: the reference, called with `inputs` in float64.
        inputs: what both get.
        roundings: see `error_budget`.
        dtype: the working precision; that of the first input if None.
    """
    budgets = error_budget(exact, inputs, dtype or inputs[0].dtype, roundings)
    expected = outputs_and_gradients(exact, [tensor.double() for tensor in inputs])
    for position, (a, e, budget) in enumerate(
        zip(outputs_and_gradients(actual, inputs), expected, budgets, strict=True)
    ):
        name = "output" if position == 0 else f"gradient of input {position - 1}"
        assert a.shape == e.shape, f"{name}: shape {tuple(a.shape)}, expected {tuple(e.shape)}"
        assert torch.isfinite(a).all(), f"{name}: not finite"
        error = (a.double() - e).abs().max().item()
        assert error <= budget, f"{name}: off by {error:.3e}, budget {budget:.3e}"

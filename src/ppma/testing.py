"""Inputs and error budgets for testing an implementation of the operators against the float64 reference.

A budget is derived, not chosen: the exact function is run in float64 on inputs whose every entry is off by one rounding
of the working precision. What that changes is the least that any implementation in that precision may be wrong by; an
implementation that rounds `roundings` times on the way to a result may be wrong by that many times as much.
"""

import math
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


def exact_logits(
    magnitude: float, grid: tuple[int, int], *, batch: tuple[int, ...] = (2, 2), seed: int = 0
) -> list[Tensor]:
    """q, k, v, log_alpha, log_beta for a scale of 1 whose logits float32 holds exactly, however large they are.

    Logits are about `magnitude` and differ by small multiples of a unit of at least 1/8 and at least their last place;
    log-decays are multiples of it too. So scores, logits and their differences are exact in float32, softmaxes are
    shared by several keys, and the gradients of float64 are those that float32 should have.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch, *grid)
    base = 2.0 ** math.floor(math.log2(magnitude))
    unit = max(2.0**-3, base * 2.0**-22)
    of_query = 2.0 ** (math.log2(base) // 2)

    def steps(low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator).to(torch.float32)

    q = torch.stack([torch.full_like(steps(0, 0), of_query), steps(-2, 2)], -1)
    k = torch.stack([torch.full_like(steps(0, 0), base / of_query), unit * steps(-2, 2)], -1)
    v = torch.randn(*shape, 3, generator=generator, dtype=torch.float64).to(torch.float32)
    return [q, k, v, -unit * steps(0, 2), -unit * steps(0, 2)]


def saturated_logits(
    magnitude: float, grid: tuple[int, int], *, batch: tuple[int, ...] = (2, 2), seed: int = 0
) -> list[Tensor]:
    """q, k, v, log_alpha, log_beta for a scale of 1 with scores of up to `magnitude` that are not exact in float32.

    Rows and columns have codes, and a query looks for the codes of the next row and column: where scores are large,
    every softmax picks one key, within lines too, and by so much that no rounding matters. The gradients of float64 are
    those that float32 should have, provided that the weight of that key comes out as 1.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch, *grid)

    def codes(count: int) -> Tensor:
        vectors = torch.randn(count, 7, generator=generator, dtype=torch.float64)
        return math.sqrt(magnitude / 2) * torch.nn.functional.normalize(vectors, dim=-1).to(torch.float32)

    rows, columns = (codes(extent) for extent in grid)
    k = torch.cat([rows[:, None].expand(*grid, -1), columns.expand(*grid, -1)], -1)
    q = k.roll((-1, -1), (0, 1))
    v = torch.randn(*shape, 3, generator=generator, dtype=torch.float64).to(torch.float32)
    decays = (random_log_decay(*shape, generator=generator) for _ in range(2))
    return [q.expand(*shape, -1), k.expand(*shape, -1), v, *decays]


def outputs_and_gradients(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output of `function` and the gradient of each input, for a fixed random cotangent."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients = torch.autograd.grad(out, leaves, cotangent.to(out))
    return [out.detach(), *gradients]


def error_budget(
    exact: Function,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    roundings: int,
    rounded: Sequence[int] | None = None,
) -> list[float]:
    """The largest error allowed for the output and for the gradient of each input.

    Args:
        exact: the function in float64.
        inputs: its inputs; floating-point values as the implementation gets them.
        dtype: the working precision (of the values; decays are float32 at least).
        roundings: how many roundings may add up on the way to one result.
        rounded: which inputs are off by one rounding; all of them if None.

    Returns:
        One absolute bound for the output and one for each gradient.
    """
    generator = torch.Generator().manual_seed(1)
    wide = [tensor.double() for tensor in inputs]
    base = outputs_and_gradients(exact, wide)
    worst = [torch.finfo(dtype).eps * tensor.abs().max().item() for tensor in base]
    for _ in range(3):
        moved = []
        for position, (tensor, given) in enumerate(zip(wide, inputs, strict=True)):
            eps = torch.finfo(given.dtype).eps if rounded is None or position in rounded else 0.0
            sign = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor) * 2 - 1
            moved.append(tensor * (1 + eps * sign))
        for position, (a, b) in enumerate(zip(outputs_and_gradients(exact, moved), base, strict=True)):
            worst[position] = max(worst[position], (a - b).abs().max().item())
    return [roundings * value for value in worst]


def assert_no_worse(
    actual: Function,
    yardstick: Function,
    exact: Function,
    inputs: Sequence[Tensor],
    factor: float = 4.0,
    rounded: Sequence[int] | None = None,
) -> None:
    """Output and gradients of `actual` are off by at most `factor` times what those of `yardstick` are off by.

    Args:
        actual: the implementation under test.
        yardstick: another one, of the same precision. Its errors may be small by chance, so what one rounding of the
            inputs changes is taken instead if it is more. Numbers below the normal range may count as 0.
        exact: the reference, called with `inputs` in float64.
        inputs: what all get.
        factor: how much worse it may be.
        rounded: the inputs for which that holds; all of them if None. With `exact_logits` these are the values alone.
    """
    dtype = inputs[0].dtype
    budgets = error_budget(exact, inputs, dtype, roundings=1, rounded=rounded)
    expected = outputs_and_gradients(exact, [tensor.double() for tensor in inputs])
    results = zip(
        outputs_and_gradients(actual, inputs), outputs_and_gradients(yardstick, inputs), expected, budgets, strict=True
    )
    for position, (a, y, e, budget) in enumerate(results):
        name = "output" if position == 0 else f"gradient of input {position - 1}"
        error, other = ((tensor.double() - e).abs().max().item() for tensor in (a, y))
        bound = factor * max(other, budget, torch.finfo(dtype).tiny)
        assert error <= bound, f"{name}: off by {error:.3e}, the yardstick by {other:.3e}"


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

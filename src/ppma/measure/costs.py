"""Count the multiplications of a product with the mask while the code runs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ppma.ops import polyline_mask, reference
from ppma.ops.backends import pytorch
from ppma.ops.mask import algorithm1

aten = torch.ops.aten


class CountMultiplications(TorchDispatchMode):
    """Counts multiplications inside the context, and the elements of the largest tensor created."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplications = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
            name = func.overloadpacket
            if name is aten.prod:
                self.multiplications += args[0].numel()
            elif name in (aten.mul, aten.mul_, aten.addcmul, aten.addcmul_):
                self.multiplications += out.numel()
            elif name in (aten.bmm, aten.mm):
                self.multiplications += out.numel() * args[0].shape[-1]
        return out


@dataclass(frozen=True)
class Method:
    """A method to compute the V2H mask times x.

    Attributes:
        name: for tables.
        cost: theoretical complexity.
        run: (x, log_alpha, log_beta) -> product.
    """

    name: str
    cost: str
    run: Callable[[Tensor, Tensor, Tensor], Tensor]


def _dense(mask: Callable[..., Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def run(x: Tensor, log_alpha: Tensor, log_beta: Tensor) -> Tensor:
        return (mask(log_alpha, log_beta, paths="v2h") @ x.flatten(0, 1)).view(x.shape)

    return run


def _scan(x: Tensor, log_alpha: Tensor, log_beta: Tensor) -> Tensor:
    return pytorch.polyline_scan(x[None, None], [log_beta[None, None], log_alpha[None, None]], "forward")[0, 0]


METHODS = (
    Method("each entry along its path", "O(N^2.5)", _dense(reference.polyline_mask)),
    Method("decomposed mask (Theorem 1)", "O(N^2)", _dense(polyline_mask)),
    Method("Algorithm 1", "O(N^1.5)", algorithm1),
    Method("scans", "O(N)", _scan),
)


def count(method: Method, side: int) -> int:
    """Multiplications of `method` on a side x side grid with one channel."""
    log_alpha, log_beta = -torch.rand(2, side, side, dtype=torch.float64)
    x = torch.rand(side, side, 1, dtype=torch.float64)
    with CountMultiplications() as counter:
        method.run(x, log_alpha, log_beta)
    return counter.multiplications


def exponent(sides: Sequence[int], values: Sequence[float]) -> float:
    """Fit p in value ~ N^p for N = side^2 tokens: the least-squares slope of log(value) over log(N).

    Examples:
        >>> from ppma.measure.costs import exponent
        >>> round(exponent((8, 16), (64, 256)), 6)
        1.0
    """
    x = [2 * math.log(side) for side in sides]
    y = [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def table(sides: tuple[int, ...] = (4, 8, 16)) -> str:
    """The growth table, in Markdown."""
    heads = [f"N = {side * side}" for side in sides]
    lines = [
        f"| L x by | cost | {' | '.join(heads)} | measured exponent |",
        "| --- | --- |" + " ---: |" * (len(sides) + 1),
    ]
    for method in METHODS:
        counts = [count(method, side) for side in sides]
        power = exponent(sides[-2:], counts[-2:])
        numbers = " | ".join(f"{n:,}" for n in counts)
        lines.append(f"| {method.name} | {method.cost} | {numbers} | {power:.2f} |")
    return "\n".join(lines)

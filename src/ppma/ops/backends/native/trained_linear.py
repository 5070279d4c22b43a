"""Linear layers in training, forward and backward by kernels that leave out images that count nothing.

A bias, a residual and what each image counts are part of the product; PyTorch copies the bias to every row beforehand,
and has a pass over memory for each of the others.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ppma.ops.backends.contract import BackendUnavailableError
from ppma.ops.backends.native.fused_linear import pack, run
from ppma.ops.backends.native.linear_gradient import input_gradient, runs, weight_gradients
from ppma.ops.watching import observed

# With fewer rows, packing the weight takes longer than it saves. A fixed rule and no measurement: a training that is
# resumed repeats its bits.
FEWEST_ROWS = 1024


def product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, factors: Tensor | None) -> Tensor:
    """See `ppma.ops.trained_linear.trained_linear`; without gradients."""
    (outputs, inputs), shape = weight.shape, x.shape[:-1]
    rows = x.reshape(-1, inputs)
    if len(rows) < FEWEST_ROWS:
        return _few_rows(x, weight, bias, residual, factors)
    counts = _counts(factors, len(x))
    scale = _common(counts)
    out = torch.empty((len(rows), outputs), dtype=torch.float32, device=x.device)
    others = None if residual is None else residual.reshape(-1, outputs)
    shift = x.new_zeros(outputs) if bias is None else scale * bias if scale != 1.0 else bias.contiguous()
    packed = pack(weight, scale=scale)
    for kept, here in runs(counts, len(rows) // len(x)):
        if kept:
            run(rows[here], packed, shift, None if others is None else others[here], out[here])
        elif others is None:
            out[here] = 0.0
        else:
            out[here] = others[here]
    return out.view(*shape, outputs)


def _few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, factors: Tensor | None
) -> Tensor:
    out = F.linear(x, weight, bias)
    if factors is not None:
        out *= _beside(factors, out)
    return out if residual is None else out.add_(residual)


def _counts(factors: Tensor | None, images: int) -> list[float]:
    return [1.0] * images if factors is None else factors.tolist()


def _common(counts: Sequence[float]) -> float:
    """What the images count that count at all."""
    kept = {count for count in counts if count}
    if len(kept) > 1:
        raise BackendUnavailableError("native kernels: expected factors that are 0 or have one value")
    return kept.pop() if kept else 0.0


def _beside(factors: Tensor, images: Tensor) -> Tensor:
    return factors.view(-1, *[1] * (images.ndim - 1))


class Gradients:
    """Gradients of `factors * linear(x)`, for one gradient of its result.

    Args:
        grad: (B, ..., outputs).
        factors: (B,) or None, of the forward pass.
    """

    def __init__(self, grad: Tensor, factors: Tensor | None) -> None:
        self._rows = grad.flatten(0, -2)
        # The kernels have no gradients of their own.
        self._by_kernel = len(self._rows) >= FEWEST_ROWS and not torch.is_grad_enabled() and not observed(grad, factors)
        self._scale, self._counts = 1.0, _counts(factors, len(grad))
        if self._by_kernel:
            self._scale = _common(self._counts)
        elif all(count == self._counts[0] for count in self._counts):  # as a number it takes no pass over memory
            self._scale = self._counts[0] if self._counts else 1.0
        elif factors is not None:
            self._rows = (grad * _beside(factors, grad)).flatten(0, -2)

    def of_input(self, weight: Tensor) -> Tensor:
        """(rows, inputs)."""
        if self._by_kernel:
            return input_gradient(self._rows, weight, self._counts, self._scale)
        return _multiply(self._rows, weight, self._scale)

    def of_parameters(self, x: Tensor, for_weight: bool, for_bias: bool) -> tuple[Tensor | None, Tensor | None]:
        """(outputs, inputs) and (outputs,), None for what is not wanted; x is (rows, inputs)."""
        if self._by_kernel and for_weight:
            both = weight_gradients(self._rows, x, self._counts, self._scale)
            return both if for_bias else (both[0], None)
        of_weight = _multiply(self._rows.mT, x, self._scale) if for_weight else None
        return of_weight, self._of_bias() if for_bias else None

    def _of_bias(self) -> Tensor:
        if not self._by_kernel:
            return self._rows.sum(0) * self._scale
        total = self._rows.new_zeros(self._rows.shape[1])
        for kept, here in runs(self._counts, len(self._rows) // len(self._counts)):
            if kept:
                total += self._rows[here].sum(0)
        return total * self._scale


def _multiply(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """`scale * a b`."""
    return a @ b if scale == 1.0 else torch.addmm(a.new_zeros(()), a, b, beta=0, alpha=scale)


class _TrainedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, factors: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factors, ctx.has_residual = factors, residual is not None
        return product(x, weight, bias, residual, factors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradients = Gradients(grad, ctx.factors)
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        of_x = gradients.of_input(weight).view(x.shape) if for_x else None
        of_weight, of_bias = gradients.of_parameters(x.flatten(0, -2), for_weight, for_bias)
        return of_x, of_weight, of_bias, grad if ctx.has_residual else None, None


def trained_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, factors: Tensor | None
) -> Tensor:
    """See `ppma.ops.trained_linear.trained_linear`."""
    return _TrainedLinear.apply(x, weight, bias, residual, factors)

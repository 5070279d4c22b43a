"""Linear layers in training: forward the product with packed weights, backward PyTorch's products.

A bias, a residual and what each image counts are part of the product; PyTorch copies the bias to every row beforehand,
and has a pass over memory for each of the others.
"""

from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ppma.ops.backends.contract import BackendUnavailableError
from ppma.ops.backends.native.fused_linear import pack, run

# With fewer rows, packing the weight takes longer than it saves. A fixed rule and no measurement: a training that is
# resumed repeats its bits.
FEWEST_ROWS = 1024


def product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, factors: Tensor | None) -> Tensor:
    """See `ppma.ops.trained_linear.trained_linear`; without gradients."""
    (outputs, inputs), shape = weight.shape, x.shape[:-1]
    rows = x.reshape(-1, inputs)
    if len(rows) < FEWEST_ROWS:
        return _few_rows(x, weight, bias, residual, factors)
    counts = [1.0] * len(x) if factors is None else factors.tolist()
    scale = _common(counts)
    out = torch.empty((len(rows), outputs), dtype=torch.float32, device=x.device)
    others = None if residual is None else residual.reshape(-1, outputs)
    shift = x.new_zeros(outputs) if bias is None else scale * bias if scale != 1.0 else bias.contiguous()
    packed = pack(weight, scale)
    tokens, first = len(rows) // len(x), 0
    for kept, images in groupby(counts, bool):
        here = slice(first, first + tokens * len(list(images)))
        if kept:
            run(rows[here], packed, shift, None if others is None else others[here], out[here])
        elif others is None:
            out[here] = 0.0
        else:
            out[here] = others[here]
        first = here.stop
    return out.view(*shape, outputs)


def _few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, factors: Tensor | None
) -> Tensor:
    out = F.linear(x, weight, bias)
    if factors is not None:
        out *= _beside(factors, out)
    return out if residual is None else out.add_(residual)


def _common(counts: list[float]) -> float:
    """What the images count that count at all."""
    kept = {count for count in counts if count}
    if len(kept) > 1:
        raise BackendUnavailableError("native kernels: expected factors that are 0 or have one value")
    return kept.pop() if kept else 0.0


def _beside(factors: Tensor, images: Tensor) -> Tensor:
    return factors.view(-1, *[1] * (images.ndim - 1))


def of_product(grad: Tensor, factors: Tensor | None) -> tuple[Tensor, float]:
    """The gradient of the linear layer's output, as a tensor (rows, outputs) and a number that multiplies it."""
    scale = 1.0
    if factors is not None:
        counts = factors.tolist()
        if all(count == counts[0] for count in counts):  # as a number it takes no pass over memory
            scale = counts[0]
        else:
            grad = grad * _beside(factors, grad)
    return grad.flatten(0, -2), scale


def multiply(a: Tensor, b: Tensor, scale: float) -> Tensor:
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
        rows, scale = of_product(grad, ctx.factors)
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        return (
            multiply(rows, weight, scale).view(x.shape) if for_x else None,
            multiply(rows.mT, x.flatten(0, -2), scale) if for_weight else None,
            rows.sum(0) * scale if for_bias else None,
            grad if ctx.has_residual else None,
            None,
        )


def trained_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, factors: Tensor | None
) -> Tensor:
    """See `ppma.ops.trained_linear.trained_linear`."""
    return _TrainedLinear.apply(x, weight, bias, residual, factors)

"""Gradients of a formula, for derivatives of higher order: the kernels of backward passes have none of their own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def composed_gradients(
    formula: Callable[..., Sequence[Tensor]], inputs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again; None for inputs that want none.

    Args:
        formula: composed of PyTorch operations; its results are distinct from its inputs.
        inputs: of `formula`, tensors and others.
        grads: of its results, None for zeros.
    """
    known = [(out, grad) for out, grad in zip(formula(*inputs), grads, strict=True) if grad is not None]
    wants = [isinstance(value, Tensor) and value.requires_grad for value in inputs]
    wanted = [value for value, wants_one in zip(inputs, wants, strict=True) if wants_one]
    outputs, of_outputs = [out for out, _ in known], [grad for _, grad in known]
    found = iter(torch.autograd.grad(outputs, wanted, of_outputs, create_graph=True, allow_unused=True))
    return tuple(next(found) if wants_one else None for wants_one in wants)

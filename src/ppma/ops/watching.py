"""Who watches the calls of operators: graph capture, transforms, modes, profilers."""

from collections.abc import Iterable

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter, type(None))


def captured() -> bool:
    """Whether a graph is being captured or a transform of `torch.func` is active."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()


def has_tangent(tensors: Iterable[Tensor]) -> bool:
    """Whether forward-mode differentiation is active and one of the tensors has a tangent."""
    if forward_ad._current_level < 0:  # outside of `dual_level`, as nearly always
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def observed(*tensors: Tensor | None) -> bool:
    """Whether a dispatch mode, a profiler or a tensor subclass follows the calls of operators.

    Otherwise a kernel may be called directly, which saves some 10 microseconds of a call through PyTorch's dispatcher.
    """
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch.autograd._profiler_enabled()
        or not all(type(tensor) in _PLAIN for tensor in tensors)
    )

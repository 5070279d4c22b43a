"""Training with less memory: what is quickly computed again is not kept for the backward pass."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from ppma.ops.backends import kernels_serve

Again = Callable[[], Tensor]
Kept = Tensor | tuple[Again, torch.Size, tuple[int, ...], int | torch.SymInt]
_known: ContextVar[dict[int, Again] | None] = ContextVar("known", default=None)


def recomputing(value: Tensor, again: Again) -> contextlib.AbstractContextManager[None]:
    """Operations called inside keep, instead of `value`, how to compute it again, bit for bit.

    Only where the native kernels serve, which make the values in question nearly free. Gradient checkpointing and other
    hooks on saved tensors have their own idea of what to keep: inside them nothing is done.

    Args:
        value: a tensor that lives as long as the context.
        again: computes it from tensors that are kept anyway.
    """
    if not (torch.is_grad_enabled() and value.requires_grad) or not kernels_serve("auto", "depthwise_conv", value):
        return contextlib.nullcontext()
    return _recomputing(value, again)


@contextlib.contextmanager
def _recomputing(value: Tensor, again: Again) -> Iterator[None]:
    outer = _known.get()
    if outer is not None:  # its hooks look here too
        outer[_address(value)] = again
        try:
            yield
        finally:
            del outer[_address(value)]
        return
    with contextlib.ExitStack() as hooks:
        if not _hooked():
            with contextlib.suppress(RuntimeError):  # inside `torch.autograd.graph.disable_saved_tensors_hooks`
                hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(_keep, _restore))
        token = _known.set({_address(value): again})
        try:
            yield
        finally:
            _known.reset(token)


def _hooked() -> bool:
    """Whether hooks on saved tensors are active: a saved tensor takes one pair, and a probe shows if it has one."""
    probe = torch.ones((), requires_grad=True).exp()
    assert probe.grad_fn is not None
    try:
        probe.grad_fn._raw_saved_result.register_hooks(_unchanged, _unchanged)  # type: ignore[attr-defined]
    except RuntimeError:
        return True
    return False


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _keep(tensor: Tensor) -> Kept:
    again = (_known.get() or {}).get(_address(tensor))
    return tensor if again is None else (again, tensor.shape, tensor.stride(), tensor.storage_offset())


def _restore(kept: Kept) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    again, shape, stride, offset = kept
    with torch.no_grad():
        return again().as_strided(shape, stride, offset)

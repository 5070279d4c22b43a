"""Training with less memory: cheap activations are recomputed in the backward pass instead of saved."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from ppma.ops.backends import kernels_serve

Recompute = Callable[[], Tensor]
Saved = Tensor | tuple[Recompute, torch.Size, tuple[int, ...], int | torch.SymInt]
SMALLEST = 3 << 19  # bytes: recomputing less takes longer than it is worth
_recomputable: ContextVar[dict[int, Recompute] | None] = ContextVar("recomputable", default=None)


def recomputing(value: Tensor, recompute: Recompute) -> contextlib.AbstractContextManager[None]:
    """Operations inside the context save how to recompute `value`, bit for bit, instead of `value` itself.

    Active only where the native kernels run, which make the recomputation nearly free, and for values of `SMALLEST`
    bytes or more; disabled under gradient checkpointing and other saved-tensor hooks.

    Args:
        value: a tensor that outlives the context.
        recompute: computes it from tensors that are saved anyway.
    """
    return _recomputing(value, recompute) if worthwhile(value) else contextlib.nullcontext()


def worthwhile(value: Tensor) -> bool:
    """Whether a tensor like `value` had better be recomputed than saved; see `recomputing`."""
    return (
        value.device.type == "cpu"
        and torch.is_grad_enabled()
        and value.requires_grad
        and not torch.compiler.is_compiling()
        and value.nbytes >= SMALLEST
        and kernels_serve("auto", "depthwise_conv", value)
    )


@contextlib.contextmanager
def _recomputing(value: Tensor, recompute: Recompute) -> Iterator[None]:
    outer = _recomputable.get()
    if outer is not None:  # its hooks look here too
        outer[_address(value)] = recompute
        try:
            yield
        finally:
            del outer[_address(value)]
        return
    with contextlib.ExitStack() as hooks:
        if not _hooked():
            with contextlib.suppress(RuntimeError):  # inside `torch.autograd.graph.disable_saved_tensors_hooks`
                hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(_keep, _restore))
        token = _recomputable.set({_address(value): recompute})
        try:
            yield
        finally:
            _recomputable.reset(token)


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


def _keep(tensor: Tensor) -> Saved:
    recompute = (_recomputable.get() or {}).get(_address(tensor))
    return tensor if recompute is None else (recompute, tensor.shape, tensor.stride(), tensor.storage_offset())


def _restore(kept: Saved) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    recompute, shape, stride, offset = kept
    with torch.no_grad():
        return recompute().as_strided(shape, stride, offset)

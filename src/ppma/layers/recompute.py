"""Training with less memory: cheap activations are recomputed in the backward pass instead of saved."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from ppma.ops.backends import kernels_serve

Recompute = Callable[[], Tensor]
SMALLEST = 3 << 19  # bytes: recomputing less takes longer than it is worth


class _Recomputable:
    """A value that is recomputed once for all operations that saved it.

    Args:
        recompute: computes it.
    """

    def __init__(self, recompute: Recompute) -> None:
        self._recompute = recompute
        self._readers = 0
        self._value: Tensor | None = None  # from the first reader of a backward pass to the last
        self._missing = 0

    def saved(self) -> None:
        """An operation has saved the value."""
        self._readers += 1

    def read(self) -> Tensor:
        """The value, for one of these operations."""
        if self._value is None:
            with torch.no_grad():
                self._value = self._recompute()
            self._missing = self._readers
        value = self._value
        self._missing -= 1
        if self._missing == 0:
            self._value = None
        return value


Saved = Tensor | tuple[_Recomputable, torch.Size, tuple[int, ...], int | torch.SymInt]
_recomputable: ContextVar[dict[int, _Recomputable] | None] = ContextVar("recomputable", default=None)


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
        outer[_address(value)] = _Recomputable(recompute)
        try:
            yield
        finally:
            del outer[_address(value)]
        return
    with contextlib.ExitStack() as hooks:
        if not _hooked():
            with contextlib.suppress(RuntimeError):  # inside `torch.autograd.graph.disable_saved_tensors_hooks`
                hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(_keep, _restore))
        token = _recomputable.set({_address(value): _Recomputable(recompute)})
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
    value = (_recomputable.get() or {}).get(_address(tensor))
    if value is None:
        return tensor
    value.saved()
    return value, tensor.shape, tensor.stride(), tensor.storage_offset()


def _restore(kept: Saved) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    value, shape, stride, offset = kept
    return value.read().as_strided(shape, stride, offset)

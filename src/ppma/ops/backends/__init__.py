"""The dispatcher: selects the backend of an operator.

A backend is a module that follows `ppma.ops.backends.contract.Backend`, imported on first use. Backends never import
one another.
"""

import contextlib
import functools
import importlib
import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor

from ppma.ops.backends import pytorch
from ppma.ops.backends.contract import Backend, BackendUnavailableError
from ppma.ops.layout import autocast_dtype
from ppma.ops.options import BACKEND_NAMES as NAMES
from ppma.ops.watching import captured, has_tangent

__all__ = [
    "NAMES",
    "Backend",
    "BackendUnavailableError",
    "call",
    "compose",
    "excluded",
    "excluding",
    "kernels_serve",
    "resolve",
]

logger = logging.getLogger(__name__)

_MODULES = {
    "torch": f"{__name__}.pytorch",
    "native": f"{__name__}.native",
    "triton": f"{__name__}.triton",
}
# "auto" takes the first that supports the tensors.
_PREFERENCE = {"cpu": ("native", "torch"), "cuda": ("triton", "torch")}

# What has a composition too: the backend whose kernels "auto" takes.
_COMPOSED = {"cpu": "native", "cuda": "triton"}

_HALF = (torch.bfloat16, torch.float16)
# What the native kernels take: they compute in float32, and half precision is converted on the way in and out.
NATIVE_DTYPES = (torch.float32, *_HALF)
_EXCLUDED = "it is excluded in this context"
_excluded: ContextVar[frozenset[str]] = ContextVar("excluded", default=frozenset())


def excluded() -> frozenset[str]:
    """The backends excluded in this context."""
    return _excluded.get()


@contextlib.contextmanager
def excluding(*names: str) -> Iterator[None]:
    """Exclude backends inside the context, to compare them or to find a fault."""
    token = _excluded.set(_excluded.get() | set(names))
    try:
        yield
    finally:
        _excluded.reset(token)


@functools.cache
def _load(name: str) -> Backend | str:
    """The backend, or why it cannot be imported; tried once, because a failing import takes milliseconds."""
    try:
        return cast(Backend, importlib.import_module(_MODULES[name]))
    except ImportError as error:
        return f"it is not installed ({error})"
    except Exception as error:  # another version of a library that it builds on
        return f"it cannot be imported ({type(error).__name__}: {error})"


def _unsupported_reason(
    name: str, operator: str, device: torch.device, dtype: torch.dtype, padded: bool = False
) -> str | None:
    if name in _excluded.get():
        return _EXCLUDED
    backend = _load(name)
    if isinstance(backend, str):
        return backend
    if not hasattr(backend, operator):
        return f"it has no {operator}"
    if padded and "valid" not in inspect.signature(getattr(backend, operator)).parameters:
        return "it takes no key-padding mask (valid)"
    return backend.unsupported_reason(device, dtype)


def _missing_kernels() -> str | None:
    """Why the native backend runs nothing at all, or None."""
    native = _load("native")
    return native if isinstance(native, str) else native.unsupported_reason(torch.device("cpu"), torch.float32)


def resolve(name: str, operator: str, device: torch.device, dtype: torch.dtype, padded: bool = False) -> Backend:
    """The backend that runs `operator` on tensors of this device and dtype, with a key-padding mask if `padded`.

    Raises:
        BackendUnavailableError: `name` is not "auto" and that backend does not support such tensors.
    """
    if name != "auto":
        reason = _unsupported_reason(name, operator, device, dtype, padded)
        if reason is not None:
            raise BackendUnavailableError(
                f"backend={name!r} cannot run {operator} for {dtype} tensors on {device}: {reason}"
            )
        return cast(Backend, _load(name))
    for candidate in _PREFERENCE.get(device.type, ("torch",)):
        reason = _unsupported_reason(candidate, operator, device, dtype, padded)
        if reason is None:
            logger.debug("auto chose %s to run %s for %s on %s", candidate, operator, dtype, device)
            return cast(Backend, _load(candidate))
        # Without its kernels a device is slow, and looks like a success.
        if device.type == "cuda" and reason == _load(candidate):
            _warn_missing(candidate, reason)
        elif device.type == "cuda" and reason != _EXCLUDED:
            _warn_once(f"{operator} runs without the {candidate} backend for {dtype} on {device}: {reason}")
        elif candidate == "native" and reason == _missing_kernels():
            _warn_once(f"ppma runs in plain PyTorch on the CPU, which is slower: {reason}; `ppma doctor` says more")
    raise BackendUnavailableError(f"no backend can run {operator} for {dtype} tensors on {device}")


def call(name: str, operator: str, *arguments: Any, valid: Tensor | None = None) -> Any:
    """Run an operator of `torch.ops.ppma`; device and dtype of the first argument select the backend.

    Some limits show only when a kernel runs (it does not compile for an unknown device, a head is too wide); then
    "auto" warns once and uses PyTorch.
    """
    padding = {} if valid is None else {"valid": valid}
    if _widens(name, operator, arguments[0], bool(padding)):
        return _in_float32(name, operator, arguments, valid)
    backend = resolve(name, operator, arguments[0].device, arguments[0].dtype, bool(padding))
    try:
        return getattr(backend, operator)(*arguments, **padding)
    except BackendUnavailableError as error:
        if name != "auto":
            raise
        _warn_once(f"{operator} runs in plain PyTorch: {error}")
    if operator == "polyline_attention_backward":
        grad, q, k, v, log_alpha, log_beta, _out, _stats, _first, options = arguments
        # A backend saves logits in units of its own; those of another would be of no use here.
        saved = pytorch.polyline_attention(q, k, v, log_alpha, log_beta, options, valid)
        arguments = (grad, q, k, v, log_alpha, log_beta, *saved, options)
    return getattr(pytorch, operator)(*arguments, **padding)


def _widens(name: str, operator: str, x: Tensor, padded: bool = False) -> bool:
    """Whether half precision on the CPU runs on the native kernels, which compute in float32."""
    return (
        x.dtype in _HALF
        and x.is_cpu
        and name in ("auto", "native")
        and _unsupported_reason("native", operator, x.device, torch.float32, padded) is None
    )


def _in_float32(name: str, operator: str, arguments: Sequence[Any], valid: Tensor | None) -> Any:
    """`call` on float32 copies of half-precision arguments; gradients take the dtypes of their tensors, the first
    result of other operators that of the first argument.
    """
    results = call(name, operator, *map(_wide, arguments), valid=valid)
    if operator.endswith("_backward"):
        like = [tensor for given in arguments[1:] for tensor in (given if isinstance(given, list) else [given])]
        narrow = [result.to(tensor.dtype) for result, tensor in zip(results, like, strict=False)]
        return narrow if isinstance(results, list) else tuple(narrow)
    dtype = arguments[0].dtype
    return (results[0].to(dtype), *results[1:]) if isinstance(results, tuple) else results.to(dtype)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


def compose(name: str, operator: str, *arguments: Any) -> Any:
    """Run an operation that has kernels and a composition of PyTorch operations: convolution, rotary split, decay head.

    The kernels run in eager mode. The composition runs in captured graphs, which must not depend on a library that may
    be missing where they are loaded; under `torch.func` and forward mode; on the CPU under autocast; and where the
    chosen backend has no such kernel ("reference", a convolution of another size).

    Args:
        name: the backend that the user chose.
        operator: its name in the contract.
        arguments: of the operator; device and dtype of the first, a tensor, select the backend.

    Raises:
        BackendUnavailableError: `name` is "native" or "triton", which does not support such tensors.
    """
    backend = _kernels(name, operator, *arguments)
    if backend is not None:
        try:
            if not _widens(name, operator, arguments[0]):
                return getattr(backend, operator)(*arguments)
            results = getattr(backend, operator)(*map(_wide, arguments))
            dtype = arguments[0].dtype
            return results.to(dtype) if isinstance(results, Tensor) else tuple(part.to(dtype) for part in results)
        except BackendUnavailableError as error:
            if name != "auto":
                raise
            if arguments[0].device.type == "cuda":
                _warn_once(f"{operator} runs in plain PyTorch: {error}")
    return getattr(pytorch, operator)(*arguments)


def kernels_serve(name: str, operator: str, *arguments: Any) -> bool:
    """Whether `compose` runs a kernel; arguments as in `compose`."""
    return _kernels(name, operator, *arguments) is not None


def _kernels(name: str, operator: str, *arguments: Any) -> Backend | None:
    """The backend whose kernel `compose` runs; None for the composition."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    x = tensors[0]
    chosen = _COMPOSED.get(x.device.type) if name == "auto" else name
    if chosen not in ("native", "triton") or captured():
        return None
    if chosen == "native" and autocast_dtype(x.device) is not None:  # it computes in float32
        return None
    # Subclasses (fake tensors among them) have operations but no memory that a kernel could read.
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors):
        return None
    if has_tangent(tensors):
        return None
    dtype = torch.float32 if _widens(name, operator, x) else x.dtype
    if name == "auto" or not hasattr(_load(chosen), operator):
        reason = _unsupported_reason(chosen, operator, x.device, dtype)
        if reason is None:
            return cast(Backend, _load(chosen))
        if x.device.type == "cuda" and reason == _load(chosen):
            _warn_missing(chosen, reason)
        return None
    return resolve(chosen, operator, x.device, dtype)


def _warn_missing(name: str, reason: str) -> None:
    """Once for all operators, dtypes and devices: none of them has this backend."""
    _warn_once(f"ppma runs without the {name} backend on the GPU, which is slower: {reason}")


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)

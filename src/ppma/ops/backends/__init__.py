"""Which implementation runs an operator.

A backend is a module with the functions that `ppma.ops.library` calls (`scan`, `attention`, `criss_cross`, `linear`,
each with its `_backward`; it may lack some) and `why_not(device, dtype)`, which says why it cannot serve such tensors,
or None. It is imported when it is first asked for. Backends never import one another.
"""

import contextlib
import functools
import importlib
import logging
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

logger = logging.getLogger(__name__)

_MODULES = {
    "torch": "ppma.ops.backends.pytorch",
    "native": "ppma.ops.backends.native",
    "triton": "ppma.ops.backends.triton",
}
# "auto" takes the first that can serve the device.
_PREFERENCE = {"cpu": ("native", "torch"), "cuda": ("triton", "torch")}

# What the public functions accept; "reference" is the oracle and never reaches an operator.
NAMES = ("auto", "reference", *_MODULES)


_excluded: frozenset[str] = frozenset()


@contextlib.contextmanager
def excluding(*names: str) -> Iterator[None]:
    """Do without these backends inside the context, in the whole process: to compare them, or to find a fault."""
    global _excluded
    before, _excluded = _excluded, _excluded | set(names)
    try:
        yield
    finally:
        _excluded = before


class BackendUnavailableError(RuntimeError):
    """A backend cannot run here. Raised to the user only if that backend was chosen explicitly."""


def _why_not(name: str, operator: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if name in _excluded:
        return "it is excluded here"
    try:
        module = importlib.import_module(_MODULES[name])
    except ImportError as error:
        return f"it is not installed ({error})"
    if not hasattr(module, operator):
        return f"it has no {operator}"
    return module.why_not(device, dtype)


def resolve(name: str, operator: str, device: torch.device, dtype: torch.dtype) -> ModuleType:
    """The backend module that runs `operator` on tensors of this device and dtype.

    Raises:
        BackendUnavailableError: `name` is not "auto" and that backend cannot serve such tensors.
    """
    if name != "auto":
        reason = _why_not(name, operator, device, dtype)
        if reason is not None:
            raise BackendUnavailableError(
                f"backend={name!r} cannot run {operator} for {dtype} tensors on {device}: {reason}"
            )
        return importlib.import_module(_MODULES[name])
    for candidate in _PREFERENCE.get(device.type, ("torch",)):
        if _why_not(candidate, operator, device, dtype) is None:
            logger.debug("auto chose %s to run %s for %s on %s", candidate, operator, dtype, device)
            return importlib.import_module(_MODULES[candidate])
    raise BackendUnavailableError(f"no backend can run {operator} for {dtype} tensors on {device}")


def call(name: str, operator: str, values: torch.Tensor, *args: Any) -> Any:
    """Run `operator` with the backend for tensors like `values`.

    A backend may find out only now that it cannot (a kernel that does not compile on an unknown device, a head too
    wide); then "auto" warns once and takes PyTorch instead.
    """
    module = resolve(name, operator, values.device, values.dtype)
    try:
        return getattr(module, operator)(*args)
    except BackendUnavailableError as error:
        if name != "auto":
            raise
        _warn_once(f"{operator} runs in plain PyTorch: {error}")
    return getattr(importlib.import_module(_MODULES["torch"]), operator)(*args)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)

"""Finds and loads the shared library of the kernels, once for each instruction set, and calls into it.

torch is imported first, so that the library's OpenMP runtime is the copy that torch has already loaded: a second one in
the process would compete with it for the cores.
"""

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Fastest first. PPMA_NATIVE_ISA forces one; PPMA_NATIVE_DIR names another folder to load from (the sanitizer build).
INSTRUCTION_SETS = ("avx512", "avx2", "portable")
_CAPABILITY = {"AVX512": INSTRUCTION_SETS, "AVX2": INSTRUCTION_SETS[1:]}

_forked = False


def _remember_fork() -> None:
    global _forked
    _forked = True


# libgomp's worker threads do not survive a fork, and a team of more than one would wait for them forever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_remember_fork)


def threads() -> int:
    """How many threads a kernel may use now."""
    return 1 if _forked else torch.get_num_threads()


def _path(isa: str) -> Path:
    return Path(os.environ.get("PPMA_NATIVE_DIR") or Path(__file__).parent) / f"libppma_{isa}.so"


@functools.cache
def _best_isa() -> str | None:
    """The fastest instruction set that this CPU has and that was built."""
    supported = _CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), ("portable",))
    return next((isa for isa in supported if _path(isa).exists()), None)


def isa() -> str | None:
    """The instruction set in use: "avx512", "avx2" or "portable"; None if the library was not built."""
    return os.environ.get("PPMA_NATIVE_ISA") or _best_isa()


@functools.cache
def _load(isa: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(_path(isa)))


def why_not() -> str | None:
    """Why no kernel can run, or None."""
    name = isa()
    if name is None:
        return "the native library was not built (installing ppma with a C++ compiler builds it)"
    try:
        _load(name)
    except OSError as error:
        return f"the native library does not load ({error})"
    return None


class View(ctypes.Structure):
    """A float32 tensor of up to five axes as the kernels see it: `struct View` of csrc/view.h."""

    _fields_ = (("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 5))

    @classmethod
    def of(cls, tensor: Tensor) -> "View":
        """The tensor must stay alive during the call."""
        return cls(tensor.data_ptr(), tensor.stride())


class Kernel:
    """A function of the library, looked up in the one that is in use at the time of the call."""

    def __init__(self, name: str, *argument_types: Any) -> None:
        self.name = name
        self.argument_types = argument_types
        self._functions: dict[str, Any] = {}

    def __call__(self, *arguments: Any) -> None:
        """Call it without the GIL; it returns 0, or 1 if there was no memory for its scratch space."""
        name = isa()
        assert name is not None, "backends.resolve asks why_not before any kernel runs"
        function = self._functions.get(name)
        if function is None:
            function = getattr(_load(name), self.name)
            function.argtypes = self.argument_types
            function.restype = ctypes.c_int
            self._functions[name] = function
        if function(*arguments):
            raise MemoryError(f"{self.name}: no memory for scratch space")

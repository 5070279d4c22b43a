"""Finds, loads and calls the shared library of the kernels, one for each instruction set.

torch is imported first, so that the library's OpenMP runtime is the copy that torch has already loaded: a second one in
the process would compete with it for the cores.
"""

import ctypes
import functools
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppma.ops.backends.contract import BackendUnavailableError

# Fastest first. PPMA_NATIVE_ISA forces one; PPMA_NATIVE_DIR names another folder to load from (the sanitizer build).
# Both are read only here: a call has several uses for them, and a look-up in os.environ takes microseconds.
INSTRUCTION_SETS = ("avx512", "avx2", "portable")
forced_isa = os.environ.get("PPMA_NATIVE_ISA")
folder = os.environ.get("PPMA_NATIVE_DIR", "")
_CAPABILITY = {"AVX512": INSTRUCTION_SETS, "AVX2": INSTRUCTION_SETS[1:]}

# Of csrc/library.cpp: a library of another version would read other structures.
ABI = 17

_forked = False


def _remember_fork() -> None:
    global _forked
    _forked = True


# libgomp's worker threads do not survive a fork, and a team of more than one would wait for them forever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_remember_fork)


def threads() -> int:
    """The number of threads that a kernel may use."""
    return 1 if _forked else torch.get_num_threads()


@functools.cache
def _available(folder: str) -> tuple[str, ...]:
    supported = _CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), INSTRUCTION_SETS[-1:])
    return tuple(isa for isa in supported if _path(isa, folder).exists())


def _path(isa: str, folder: str) -> Path:
    return Path(folder or Path(__file__).parent) / f"libppma_{isa}.so"


def path(isa: str) -> Path:
    """The file of the library for an instruction set, whether it was built or not."""
    return _path(isa, folder)


def available() -> tuple[str, ...]:
    """The instruction sets that this CPU has and that were built, fastest first."""
    return _available(folder)


def isa() -> str | None:
    """The instruction set in use: "avx512", "avx2" or "portable"; None if the library was not built."""
    return forced_isa or next(iter(available()), None)


@functools.cache
def _load(folder: str, isa: str | None) -> ctypes.CDLL:
    found = _available(folder)
    if not found:
        raise BackendUnavailableError(
            "the native library was not built (installing ppma where there is a C++ compiler builds it)"
        )
    isa = isa or found[0]
    if isa not in found:
        raise BackendUnavailableError(f"PPMA_NATIVE_ISA: expected one of {', '.join(found)} here, got {isa!r}")
    try:
        library = ctypes.CDLL(str(_path(isa, folder)))
    except OSError as error:
        raise BackendUnavailableError(f"the native library does not load ({error})") from error
    if not hasattr(library, "ppma_abi") or library.ppma_abi() != ABI:
        raise BackendUnavailableError("the native library is of another version than the package; install ppma again")
    return library


def loaded() -> ctypes.CDLL:
    """The library in use.

    Raises:
        BackendUnavailableError: there is none, or it does not load.
    """
    return _load(folder, forced_isa)


def unsupported_reason() -> str | None:
    """Why no kernel can run, or None."""
    try:
        loaded()
    except BackendUnavailableError as error:
        return str(error)
    return None


def address(tensor: Tensor, shape: Sequence[int]) -> int:
    """The address of a float32 tensor of this shape, in any strides.

    Every pointer passed to a kernel comes from here: a kernel cannot check, and would read or write past the end. The
    tensor must stay alive during the call.

    Raises:
        ValueError: the tensor is of another type or shape, or not on the CPU.
    """
    if tensor.dtype is not torch.float32 or not tensor.is_cpu or tensor.shape != shape:
        raise ValueError(
            f"native kernels: expected torch.float32 of shape {tuple(shape)} on the CPU, "
            f"got {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
        )
    return tensor.data_ptr()


def contiguous_address(tensor: Tensor, shape: Sequence[int]) -> int:
    """`address` for a kernel that expects a contiguous tensor."""
    if not tensor.is_contiguous():
        raise ValueError(f"native kernels: expected a contiguous tensor, got strides {tensor.stride()}")
    return address(tensor, shape)


def require_tokens(grid_and_channels: Sequence[int]) -> None:
    """Batches may be empty, grids and channels may not: kernels divide by their extents.

    Raises:
        ValueError: one of these extents is 0.
    """
    if 0 in grid_and_channels:
        raise ValueError(
            f"native kernels: expected a grid with at least one token and channel, got {tuple(grid_and_channels)}"
        )


_VIEW = struct.Struct("P5q")
_NO_STRIDES = (0,) * 5


def view(tensor: Tensor, shape: Sequence[int]) -> bytes:
    """A float32 tensor of this shape, of up to five axes, as `struct View` of csrc/view.h; see `address`."""
    strides = tensor.stride()
    return _VIEW.pack(address(tensor, shape), *strides, *_NO_STRIDES[len(strides) :])


def contiguous_view(address: int, shape: Sequence[int]) -> bytes:
    """`view` of a contiguous part of a tensor's memory, four axes of this shape."""
    _, height, width, channels = shape
    return _VIEW.pack(address, height * width * channels, width * channels, channels, 1, 0)


class Kernel:
    """A function of the library in use at the time of the call.

    Structures are passed as bytes: `struct.pack` takes a fraction of the time that nested ctypes structures take.
    """

    def __init__(self, name: str, *argument_types: Any) -> None:
        self.name = name
        self.argument_types = argument_types
        self._functions: dict[ctypes.CDLL, Any] = {}

    def __call__(self, *arguments: Any) -> None:
        """Call it without the GIL; it returns 0, or 1 if there was no memory for its scratch space."""
        library = loaded()
        function = self._functions.get(library) or self._bind(library)
        if function(*arguments):
            raise MemoryError(f"{self.name}: no memory for scratch space")

    def _bind(self, library: ctypes.CDLL) -> Any:
        try:
            function = library[self.name]
        except AttributeError as error:
            raise BackendUnavailableError(
                f"the native library is older than the package ({self.name} is missing); install ppma again"
            ) from error
        function.argtypes = self.argument_types
        self._functions[library] = function
        return function


_scratch_bytes = Kernel("ppma_scratch_bytes", ctypes.c_void_p)


def scratch_bytes() -> int:
    """The memory that the kernels keep between calls, in bytes; 0 without the library."""
    if unsupported_reason():
        return 0
    count = ctypes.c_int64()
    _scratch_bytes(ctypes.addressof(count))
    return count.value

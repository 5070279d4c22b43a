"""How kernels are launched: one function, which picks a launch configuration and turns a failing compile into an error
that "auto" can answer with another backend.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from ppma.ops.backends.contract import BackendUnavailableError
from ppma.ops.backends.triton.tiles import Field

# Read when Triton is imported, which decides what `triton.jit` makes of a function.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

WIDEST_HEAD = 128

# What a driver says when it cannot load a kernel. Other driver errors (an illegal address, say) are bugs and pass.
_LOAD_FAILURES = ("kernel image is invalid", "no kernel image", "PTX JIT compilation failed", "invalid device function")


@dataclass(frozen=True)
class Config:
    """One way to launch a kernel.

    Attributes:
        warps: of a program, 32 threads each.
        stages: of the loop's pipeline.
        constants: of the kernel.
        waves: of a program on AMD's GPUs, 64 threads each; None for as many as warps.
    """

    warps: int
    stages: int = 1
    constants: dict[str, int] = field(default_factory=dict)
    waves: int | None = None

    def options(self, hip: bool = torch.version.hip is not None) -> dict[str, Any]:
        """Keyword arguments of the launch, for AMD's GPUs or NVIDIA's."""
        warps = self.waves or self.warps if hip else self.warps
        options = {"num_warps": warps, "num_stages": self.stages, "enable_fp_fusion": True}
        if not hip:  # AMD's compiler has no such option
            # Without an explicit limit NVIDIA's assembler spills a few registers where that lets one more program run
            # at a time; with too high a one the registers of all threads would not fit the 65,536 that there are.
            options["maxnreg"] = min(255, 65_536 // (32 * self.warps))
        return {**self.constants, **options}


@dataclass(frozen=True)
class Launch:
    """A launch as it was recorded: what Triton needs to compile the kernel.

    Attributes:
        kernel: a `triton.jit` function.
        grid: number of programs along each axis.
        arguments: with the options of the configuration.
        config: the configuration.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    config: Config


_recorder: ContextVar[list[Launch] | None] = ContextVar("recorder", default=None)
_failed: dict[tuple[Any, ...], str] = {}
_tuned: dict[tuple[Any, ...], Config] = {}


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect the launches of the operators called inside instead of running them; tensors may be on "meta"."""
    launches: list[Launch] = []
    token = _recorder.set(launches)
    try:
        yield launches
    finally:
        _recorder.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], configs: Sequence[Config], **arguments: Any) -> None:
    """Run `kernel` on `grid` with the first of `configs`, or the fastest if `PPMA_TRITON_AUTOTUNE=1`.

    Args:
        kernel: a `triton.jit` function. It only reads its inputs and only writes its outputs, so it may be repeated.
        grid: number of programs along each axis.
        configs: the possible launch configurations, the default first.
        **arguments: fields, tensors, numbers, None for what is absent; compile-time constants in capitals.

    Raises:
        BackendUnavailableError: the kernel does not compile for this device, or does not fit it.
    """
    if 0 in grid:
        return
    recorder = _recorder.get()
    if recorder is not None:
        recorder.append(Launch(kernel, grid, {**arguments, **configs[0].options()}, configs[0]))
        return
    tensors = [v.data if isinstance(v, Field) else v for v in arguments.values() if isinstance(v, Field | Tensor)]
    device = tensors[0].device
    guard = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

    def run(config: Config) -> None:
        kernel[grid](**arguments, **config.options())

    constants = ((name, value) for name, value in arguments.items() if name.isupper())
    key = (kernel.__name__, device, *constants, *(tensor.dtype for tensor in tensors))
    if key in _failed:
        raise BackendUnavailableError(_failed[key])
    with guard:
        try:
            run(_fastest(key + grid, configs, run) if _autotuning() and len(configs) > 1 else configs[0])
        except Exception as error:
            if INTERPRETED or not _is_compile_failure(error):
                raise
            _failed[key] = f"the Triton kernel {kernel.__name__} does not compile for {device}: {error}"
            raise BackendUnavailableError(_failed[key]) from error


def _is_compile_failure(error: Exception) -> bool:
    message = str(error)
    return "Triton Error [" not in message or any(failure in message for failure in _LOAD_FAILURES)


def _autotuning() -> bool:
    return os.environ.get("PPMA_TRITON_AUTOTUNE", "0") == "1"


def _milliseconds(run: Callable[[], None]) -> float:
    """Median time of a launch, infinite where the configuration does not fit the device."""
    try:
        return float(triton.testing.do_bench(run, return_mode="median"))
    except Exception as error:
        if not _is_compile_failure(error):
            raise
        return float("inf")


def _fastest(key: tuple[Any, ...], configs: Sequence[Config], run: Callable[[Config], None]) -> Config:
    if key not in _tuned:
        _tuned[key] = min(configs, key=lambda config: _milliseconds(lambda: run(config)))
    return _tuned[key]


def upcast(tensor: Tensor) -> bool:
    """Whether products of such tensors must be computed in float32: the interpreter's bfloat16 product is wrong."""
    return INTERPRETED and tensor.dtype == torch.bfloat16


def padded(channels: int) -> int:
    """Channels of a tile: a power of two, at least what a matrix unit takes."""
    return max(16, triton.next_power_of_2(channels))


def check_channels(*tensors: Tensor) -> None:
    """Heads wider than a tile are left to other backends."""
    for tensor in tensors:
        if tensor.shape[-1] > WIDEST_HEAD:
            raise BackendUnavailableError(
                f"its attention kernels take heads of up to {WIDEST_HEAD} channels, not {tensor.shape[-1]}"
            )

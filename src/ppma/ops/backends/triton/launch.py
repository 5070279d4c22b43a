"""How kernels are launched: one function, which picks a launch configuration and turns a failing compile into an error
that "auto" can answer with another backend.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from ppma.ops.backends.contract import BackendUnavailableError
from ppma.ops.backends.triton.tiles import Field

# Read when Triton is imported, which decides what `triton.jit` makes of a function.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

WIDEST_HEAD = 128


# Not Triton's, which unwrap compile-time constants first and take a microsecond.
def cdiv(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


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

    @cached_property
    def here(self) -> dict[str, Any]:
        """The options on this machine."""
        return self.options()


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
        recorder.append(Launch(kernel, grid, {**arguments, **configs[0].here}, configs[0]))
        return
    device = _device(arguments)
    # A context takes longer than asking whether it is needed.
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()

    def run(config: Config) -> None:
        kernel[grid](**arguments, **config.here)

    if _failed and (reason := _failed.get(_variant(kernel, device, arguments))):
        raise BackendUnavailableError(reason)
    with torch.cuda.device(device) if elsewhere else contextlib.nullcontext():
        try:
            if len(configs) > 1 and _autotuning():
                run(_fastest((*_variant(kernel, device, arguments), *grid), configs, run))
            else:
                run(configs[0])
        except Exception as error:
            if INTERPRETED or not _is_compile_failure(error):
                raise
            reason = f"the Triton kernel {kernel.__name__} does not compile for {device}: {error}"
            _failed[_variant(kernel, device, arguments)] = reason
            raise BackendUnavailableError(reason) from error


def _tensors(arguments: dict[str, Any]) -> Iterator[Tensor]:
    for value in arguments.values():
        if isinstance(value, Field):
            yield value.data
        elif isinstance(value, Tensor):
            yield value


def _device(arguments: dict[str, Any]) -> torch.device:
    return next(_tensors(arguments)).device


def _variant(kernel: Any, device: torch.device, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """What a kernel is compiled for, up to specialisation."""
    constants = ((name, value) for name, value in arguments.items() if name.isupper())
    return kernel.__name__, device, *constants, *(tensor.dtype for tensor in _tensors(arguments))


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


def precision(tensor: Tensor) -> str:
    """How products of such tensors are computed, as `tiles.product` takes it.

    Products of float32 run on the matrix units only where PyTorch's own may: `torch.backends.cuda.matmul.allow_tf32`,
    or "tf32" in `fp32_precision`. No setting of PyTorch asks for sums of three such products ("tf32x3"). Triton's also
    round by the order of the operands, so a kernel with fixed keys would not find the forward pass's logits again.
    """
    if INTERPRETED and tensor.dtype == torch.bfloat16:
        return "upcast"
    if tensor.dtype != torch.float32 or torch.version.hip is not None:
        return "ieee"
    matmul = torch.backends.cuda.matmul
    allowed = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return "tf32" if allowed else "ieee"


def padded(channels: int) -> int:
    """Channels of a tile: a power of two, at least what a matrix unit takes."""
    return max(16, next_power_of_2(channels))


def check_channels(*tensors: Tensor) -> None:
    """Heads wider than a tile are left to other backends."""
    for tensor in tensors:
        if tensor.shape[-1] > WIDEST_HEAD:
            raise BackendUnavailableError(
                f"its attention kernels take heads of up to {WIDEST_HEAD} channels, not {tensor.shape[-1]}"
            )

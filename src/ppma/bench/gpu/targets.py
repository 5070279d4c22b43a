"""Ahead-of-time compilation for GPUs that are not there, and the resources that the compiled kernels take."""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ppma.ops.backends.triton.launch import Launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class _Driver:
    """What Triton asks of a driver when it only compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> str:
        return f"{self._target.backend}:{self._target.arch}"  # kernels are cached by device

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@dataclass(frozen=True)
class Multiprocessor:
    """What the programs on one multiprocessor (a compute unit of AMD's) share.

    Attributes:
        registers: of all threads, 32 bits each.
        granule: registers of a warp are given out in multiples of this.
        warps: the most that can be resident.
        programs: the most that can be resident.
        shared: bytes of shared memory.
        reserved: bytes of shared memory that the system takes for each program.
    """

    registers: int = 65_536
    granule: int = 256
    warps: int = 64
    programs: int = 32
    shared: int = 228 << 10
    reserved: int = 1 << 10


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(shared=164 << 10),
    "sm_89": Multiprocessor(warps=48, programs=24, shared=100 << 10),
    "sm_90": Multiprocessor(),
    "sm_100": Multiprocessor(),
    "gfx942": Multiprocessor(4 * 512 * 64, 8 * 64, 32, 32, 64 << 10, 0),
}


def device_target(device: torch.device) -> str:
    """The name of a GPU's architecture, as in TARGETS; it may be one that is not there."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@dataclass(frozen=True)
class Resources:
    """What one program of a compiled kernel takes.

    Attributes:
        registers: of a thread.
        shared: bytes of shared memory.
        spilled: bytes of a thread's registers that live in memory instead.
        threads: of a program.
    """

    registers: int
    shared: int
    spilled: int
    threads: int

    def occupancy(self, target: str) -> float:
        """Warps that fit a multiprocessor, over the most that it takes."""
        unit, lanes = MULTIPROCESSORS[target], TARGETS[target].warp_size
        warps = self.threads // lanes
        of_warp = -(-self.registers * lanes // unit.granule) * unit.granule
        by_registers = unit.registers // (of_warp * warps)
        by_shared = unit.shared // max(1, self.shared + unit.reserved)
        return min(by_registers, by_shared, unit.programs, unit.warps // warps) * warps / unit.warps


@contextlib.contextmanager
def active(target: GPUTarget) -> Iterator[None]:
    """Triton compiles for a GPU that need not be there."""
    name = "_active" if hasattr(driver, "_active") else "active"  # of Triton 3.3
    before = getattr(driver, name)
    driver.set_active(_Driver(target))
    try:
        yield
    finally:
        setattr(driver, name, before)


def compile_for(launch: Launch, target: str) -> Any:
    """Compile a recorded launch for one of TARGETS, specialised as the launch itself would be."""
    hip = TARGETS[target].backend == "hip"
    arguments = {name: value for name, value in launch.arguments.items() if name != "maxnreg"}
    arguments |= launch.config.options(hip)
    with active(TARGETS[target]):
        return launch.kernel.warmup(grid=launch.grid, **arguments)


def resources(compiled: Any) -> Resources:
    """Read registers, shared memory and spills back from a compiled kernel."""
    shared, threads = compiled.metadata.shared, compiled.metadata.num_warps * compiled.metadata.target.warp_size
    if "cubin" in compiled.asm:
        return _cuda_resources(compiled.asm["cubin"], shared, threads)
    # Scalar registers spill to lanes of vector registers; only the private segment is memory.
    registers, memory = (
        int(_find(rf"\.{name}:\s*(\d+)", compiled.asm["amdgcn"]))
        for name in ("vgpr_count", "private_segment_fixed_size")
    )
    return Resources(registers, shared, memory, threads)


def cuobjdump(cubin: bytes, option: str) -> str:
    """What the tool that comes with Triton prints about a compiled kernel."""
    tool = Path(next(iter(nvidia.__path__))) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def _cuda_resources(cubin: bytes, shared: int, threads: int) -> Resources:
    usage = cuobjdump(cubin, "--dump-resource-usage")
    # Our kernels have no arrays, so a stack frame is spilled registers.
    registers, stack = (int(_find(rf"{name}:(\d+)", usage)) for name in ("REG", "STACK"))
    return Resources(registers, shared, stack, threads)


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found, f"{pattern} not found in the compiler's output"
    return found.group(1)

"""Does this installation work? What it has, what it lacks, and every operator against the float64 reference."""

import ctypes
import os
import platform
import re
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from packaging.requirements import Requirement
from torch import Tensor

import ppma
from ppma.ops import backends, reference
from ppma.ops.backends.native import library
from ppma.testing import assert_accurate, random_log_decay

Function = Callable[..., Tensor]

# Roundings that may add up on the way to a result, as in the tests of the kernels.
ROUNDINGS = 8
GRID = (2, 4)
REINSTALL = "install a C++ compiler, then ppma again: pip install --no-cache-dir --no-deps --force-reinstall ."


class Case(NamedTuple):
    """An operator of the self-test.

    Attributes:
        label: its name and options.
        operator: its name in the dispatcher; None if it is plain PyTorch in every backend.
        actual: the operator.
        exact: its definition in float64.
        inputs: what both get.
    """

    label: str
    operator: str | None
    actual: Function
    exact: Function
    inputs: list[Tensor]


def versions() -> str:
    """Python, the platform and the packages that decide what runs."""
    names = ("torch", "timm", "triton", "torchvision")
    found = [f"{name} {version}" for name in names if (version := _version(name))]
    machine = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    return f"{', '.join(found)}; {machine}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_kernels() -> str:
    """The native kernels: built for what, which of them runs, on how many threads."""
    built = [isa for isa in library.INSTRUCTION_SETS if library.path(isa).exists()]
    if not built:
        return f"not built, plain PyTorch is used instead, which is slower; {REINSTALL}"
    reason = library.unsupported_reason()
    if reason is not None:
        return f"built ({', '.join(built)}) but not usable: {reason}"
    size = ctypes.c_int32()
    library.Kernel("ppma_team_size", ctypes.c_int, ctypes.POINTER(ctypes.c_int32))(2, size)
    threads = library.threads() if size.value == 2 else 1
    words = "with OpenMP" if size.value == 2 else "built without OpenMP"
    count = f"{threads} thread{'s' * (threads != 1)} {words}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{library.isa()} in use ({', '.join(built)} built; PyTorch sees {capability}), {count}"


def compiler() -> str:
    """The C++ compiler that an installation would use."""
    command = shlex.split(os.environ.get("CXX", "c++"))
    found = shutil.which(command[0]) if command else None
    if found is None:
        return f"none ({shlex.join(command)!r} is not on the path); needed to build the CPU kernels only"
    try:
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{found} does not run: {error}"
    line = said.stdout.partition("\n")[0].strip()
    return f"{found}, {line}" if said.returncode == 0 and line else f"{found} does not work (exit {said.returncode})"


def gpu() -> str:
    """The GPUs that PyTorch finds."""
    if not torch.cuda.is_available():
        build = torch.version.cuda or torch.version.hip
        return f"PyTorch finds none (built {f'for {build}' if build else 'for the CPU only'})"
    names = (torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return ", ".join(f"cuda:{index} {name}" for index, name in enumerate(names))


def gpu_kernels() -> str:
    """The Triton kernels: whether "auto" would choose them."""
    if (version := _version("triton")) is None:
        return "Triton is not installed; it is part of torch's builds for Linux"
    if not torch.cuda.is_available():
        return f"Triton {version}; used on a GPU only"
    try:
        backends.resolve("triton", "polyline_scan", torch.device("cuda"), torch.float32)
    except ppma.BackendUnavailableError as error:
        return str(error)
    return f"Triton {version}; `ppma doctor --gpu` checks them"


def extras() -> dict[str, list[str]]:
    """The requirements of each extra that are not installed, or are too old."""
    missing: dict[str, list[str]] = {}
    requirements = [Requirement(line) for line in metadata.requires("ppma") or ()]
    for extra in metadata.metadata("ppma").get_all("Provides-Extra") or ():
        mine = [r for r in requirements if r.marker and r.marker.evaluate({"extra": extra})]
        if any(r.name == "ppma" for r in mine):  # the sum of others
            continue
        missing[extra] = [f"{r.name}{r.specifier}" for r in mine if r.marker and not _satisfied(r)]
    return missing


def _satisfied(requirement: Requirement) -> bool:
    version = _version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def cases() -> Iterator[Case]:
    """Every public operator on a small grid, with decays of exactly 0 and 1."""
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(2, 2, *GRID, 5, generator=generator) for _ in range(3)]
    decays = [random_log_decay(2, 2, *GRID, generator=generator) for _ in range(2)]
    valid = torch.rand(2, *GRID, generator=generator) < 0.7
    for paths in ("v2h", "h2v", "2d"):
        yield _public("polyline_scan", [qkv[2], *decays], paths=paths)
        yield _public("linear_attention", [*qkv, *decays], paths=paths)
        for name in ("polyline_attention", "criss_cross_attention"):
            for combine in ("hadamard", "logit"):
                yield _public(name, [*qkv, *decays], paths=paths, combine=combine)
    for name in ("polyline_attention", "criss_cross_attention"):
        yield _public(name, [*qkv, *decays], valid=valid)
    yield _public("decomposed_attention", [*qkv, *decays], operator="linear_attention")
    yield Case("polyline_mask", None, ppma.polyline_mask, reference.polyline_mask, decays)
    yield from _of_other_axes(generator)


def _public(name: str, inputs: list[Tensor], operator: str | None = None, **options: Any) -> Case:
    function = partial(getattr(ppma, name), **options)
    shown = [key if isinstance(value, Tensor) else f"{value}" for key, value in options.items()]
    return Case(" ".join([name, *shown]), operator or name, function, partial(function, backend="reference"), inputs)


def _of_other_axes(generator: torch.Generator) -> Iterator[Case]:
    """Three axes, and Mamba2's line."""
    x, decays = torch.randn(2, 2, 2, 3, 4), [random_log_decay(2, 2, 2, 3, generator=generator) for _ in range(3)]

    def of_sequence(function: Function) -> Function:
        return lambda *tensors: function(*tensors[:-3], tensors[-3:])

    yield Case(
        "polyline_scan_nd",
        "polyline_scan",
        of_sequence(ppma.polyline_scan_nd),
        of_sequence(reference.polyline_scan_nd),
        [x, *decays],
    )
    masks = (of_sequence(ppma.polyline_mask_nd), of_sequence(reference.polyline_mask_nd))
    yield Case("polyline_mask_nd", None, *masks, decays)
    q, k, v = (torch.randn(2, 7, 3, generator=generator) for _ in range(3))
    line = random_log_decay(2, 7, generator=generator)

    def exact_mask(log_decay: Tensor) -> Tensor:
        return reference.line_matrix(log_decay.exp()).tril()

    yield Case("causal_mask", None, ppma.causal_mask, exact_mask, [line])
    yield Case("causal_scan", None, ppma.causal_scan, lambda x, decay: exact_mask(decay) @ x, [v, line])
    yield Case(
        "causal_attention",
        None,
        ppma.causal_attention,
        lambda q, k, v, decay: (exact_mask(decay) * (q @ k.mT)) @ v,
        [q, k, v, line],
    )


def self_test() -> Iterator[tuple[str, str, str | None]]:
    """Output and gradients of every operator in float32 against float64.

    Yields:
        The case, the backend that "auto" chose for it, and how it failed, or None.
    """
    for case in cases():
        backend = "torch"
        try:
            if case.operator is not None:
                chosen = backends.resolve("auto", case.operator, torch.device("cpu"), torch.float32)
                backend = re.sub("pytorch", "torch", chosen.__name__.rpartition(".")[2])  # type: ignore[attr-defined]
            assert_accurate(case.actual, case.exact, case.inputs, ROUNDINGS)
        except Exception as error:  # one that breaks must not hide the others
            yield case.label, backend, " ".join(f"{type(error).__name__}: {error}".split())
        else:
            yield case.label, backend, None


def examine(tell: Callable[[str], None] = print) -> bool:
    """Report on the installation, one line for each thing.

    Args:
        tell: gets each line.

    Returns:
        Whether every operator is right. What is missing but optional is said, and is no failure.
    """
    tell(f"ppma {ppma.__version__} in {Path(ppma.__file__).parent}")
    tell(versions())
    tell("")
    for name, text in {
        "CPU kernels": cpu_kernels(),
        "C++ compiler": compiler(),
        "GPU": gpu(),
        "GPU kernels": gpu_kernels(),
    }.items():
        tell(f"{name:14}{text}")
    tell("")
    for name, missing in extras().items():
        line = f"missing: pip install {' '.join(map(shlex.quote, missing))}" if missing else "installed"
        tell(f"{f'[{name}]':14}{line}")
    tell("")
    counts: dict[str, int] = {}
    failures = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are missing stands above
        for label, backend, failure in self_test():
            counts[backend] = counts.get(backend, 0) + 1
            if failure is not None:
                failures.append(f"FAILED {label} ({backend}): {failure}")
    ran = ", ".join(f"{count} {backend}" for backend, count in counts.items())
    for line in failures:
        tell(line)
    total = sum(counts.values())
    passed = total - len(failures)
    tell(f"self-test: {passed} of {total} operator calls ({ran}) match the float64 reference, outputs and gradients")
    return not failures

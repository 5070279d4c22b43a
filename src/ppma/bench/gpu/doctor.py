"""Does everything work on this GPU? One check for each thing that can go wrong there, one line for each in a report.

A dry run takes the CPU and Triton's interpreter in place of the GPU, and small grids: it tests the checks.
"""

import platform
import time
import traceback
import warnings
from collections.abc import Callable

import torch
import triton

import ppma
from ppma.bench.gpu import doctor_device as device_checks
from ppma.bench.gpu import doctor_results as results
from ppma.bench.gpu import measure
from ppma.bench.gpu.doctor_context import Doctor, SkippedError
from ppma.bench.report import Report
from ppma.ops.backends.triton.launch import INTERPRETED


def check_environment(doctor: Doctor) -> str:
    """Versions and limits."""
    words = [
        f"ppma {ppma.__version__}",
        f"torch {torch.__version__}",
        f"triton {triton.__version__}",
        platform.platform(),
    ]
    if not doctor.dry:
        p = torch.cuda.get_device_properties(doctor.device)
        words += [
            f"{p.name}, {p.total_memory >> 30} GB, {p.multi_processor_count} multiprocessors, {p.major}.{p.minor}",
            f"{torch.cuda.device_count()} GPUs",
            f"built for {f'CUDA {torch.version.cuda}' if torch.version.hip is None else f'ROCm {torch.version.hip}'}",
        ]
        limits = ("shared_memory_per_block_optin", "regs_per_multiprocessor", "max_threads_per_multi_processor")
        words += [f"{name} {getattr(p, name)}" for name in limits if hasattr(p, name)]
    return "; ".join(words)


CHECKS: tuple[Callable[[Doctor], str], ...] = (
    check_environment,
    results.check_backend,
    results.check_accuracy,
    results.check_block,
    results.check_channels,
    results.check_gradient_strides,
    results.check_repeatable,
    results.check_extremes,
    device_checks.check_other_device,
    device_checks.check_stream_and_graph,
    device_checks.check_large,
    device_checks.check_compile,
    device_checks.check_image_sizes,
    device_checks.check_ddp,
    device_checks.check_occupancy,
    device_checks.check_timings,
    device_checks.check_profile,
)


def examine(device: str, dry: bool, tell: Callable[[str], None] = lambda text: None) -> tuple[str, bool]:
    """Run every check.

    Args:
        device: "cuda" or "cuda:N"; a dry run takes the CPU.
        dry: see the module.
        tell: receives a line for each check when it is done.

    Returns:
        The report as Markdown, and whether every check passed or was skipped.

    Raises:
        ValueError: there is no such GPU, or the interpreter of a dry run is not switched on.
    """
    if dry and not INTERPRETED:
        raise ValueError("--dry-run: expected TRITON_INTERPRET=1 in the environment before Triton is imported")
    doctor = Doctor(torch.device("cpu") if dry else measure.find_gpu(device), dry)
    table = Report(f"ppma doctor on {'the CPU (dry run)' if dry else device}", ["check", "result", "seconds", "detail"])
    details = []
    for check in CHECKS:
        name, start = check.__name__.removeprefix("check_").replace("_", " "), time.perf_counter()
        with warnings.catch_warnings(record=True) as caught, doctor.on_device():
            warnings.simplefilter("always")
            try:
                result, detail = "passed", check(doctor)
            except SkippedError as reason:
                result, detail = "skipped", str(reason)
            except Exception as error:  # a check that breaks must not hide the others
                result, detail = "FAILED", " ".join(f"{type(error).__name__}: {error}".split())
                details.append(f"### {name}\n\n```\n{traceback.format_exc()}```")
        fallbacks = [message for warning in caught if "runs in plain PyTorch" in (message := str(warning.message))]
        if fallbacks and result == "passed":
            result, detail = "FAILED", f"fell back: {fallbacks[0]}"
        table.rows.append([name, result, time.perf_counter() - start, detail.replace("|", "/")])
        tell(f"{result:8} {name}: {detail}")
    parts = [table.markdown(), *(report.markdown() for report in doctor.reports), *details]
    return "\n\n".join(parts) + "\n", all(row[1] != "FAILED" for row in table.rows)

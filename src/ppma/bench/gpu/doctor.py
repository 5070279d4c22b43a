"""Does everything work on this GPU? One check for each thing that can go wrong there, one line for each in a report.

A dry run takes the CPU and Triton's interpreter in place of the GPU, and small grids: it tests the checks.
"""

import platform
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import timm
import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

import ppma
import ppma.models
from ppma.bench.gpu import doctor_block, doctor_ddp, measure
from ppma.bench.report import Report
from ppma.ops import backends
from ppma.ops.backends.triton.launch import INTERPRETED
from ppma.testing import assert_accurate, random_log_decay

OPERATORS = ("polyline_scan", "polyline_attention", "criss_cross_attention", "linear_attention")
GRIDS = ((1, 1), (7, 7), (14, 14), (13, 29), (56, 56), (65, 130))
# Heads of every tile width, and one that the kernels leave to PyTorch.
CHANNELS = (16, 20, 32, 64, 128, 160)
# Roundings of the working precision that may add up on the way to a result, as in the tests of the kernels.
ROUNDINGS = 8


class SkippedError(Exception):
    """A check does not apply here; its text says why."""


@dataclass
class Doctor:
    """Where the checks run.

    Attributes:
        device: the GPU, or the CPU in a dry run.
        dry: take small cases, and skip what needs a GPU.
        reports: tables that checks add to the report.
    """

    device: torch.device
    dry: bool
    reports: list[Report] = field(default_factory=list)

    @property
    def backend(self) -> Any:
        """On a GPU "auto" must choose Triton; on the CPU it has to be named."""
        return "triton" if self.dry else "auto"

    def needs_gpu(self) -> None:
        if self.dry:
            raise SkippedError("needs a GPU")

    def inputs(
        self, grid: tuple[int, int], d: int = 16, dtype: torch.dtype = torch.float32, batch: int = 1
    ) -> list[Tensor]:
        """q, k, v as views of a packed projection, and log-decays with exact zeros and ones, one of them expanded."""
        generator = torch.Generator().manual_seed(0)
        packed = torch.randn(batch, *grid, 3, 2, d, generator=generator).to(self.device, dtype)
        q, k, v = packed.movedim(3, 0).movedim(-2, 2).unbind(0)
        log_alpha = random_log_decay(batch, 2, *grid, generator=generator).to(self.device)
        log_beta = random_log_decay(1, 1, *grid, generator=generator).to(self.device).expand(batch, 2, *grid)
        return [q, k, v, log_alpha, log_beta]


def _calls(operator: str, dry: bool) -> Iterator[dict[str, str]]:
    """Options of an operator."""
    combines = ("hadamard", "logit") if operator in ("polyline_attention", "criss_cross_attention") else (None,)
    for combine in combines:
        for paths in ("2d",) if dry else ("v2h", "h2v", "2d"):
            yield {"paths": paths} if combine is None else {"paths": paths, "combine": combine}


def _run(operator: str, tensors: list[Tensor], backend: Any, **options: Any) -> Tensor:
    given = [tensors[2], *tensors[3:]] if operator == "polyline_scan" else tensors
    return getattr(ppma, operator)(*given, backend=backend, **options)


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
            f"{p.name}, {p.total_memory >> 30} GB, {p.multi_processor_count} multiprocessors, {p.major}.{p.minor}"
        ]
        words += [f"{torch.cuda.device_count()} GPUs", f"driver for CUDA {torch.version.cuda or torch.version.hip}"]
    return "; ".join(words)


def check_backend(doctor: Doctor) -> str:
    """The backend "auto" runs the Triton kernels and does not fall back."""
    for operator in OPERATORS:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            chosen = backends.resolve(doctor.backend, operator, doctor.device, dtype)
            if not chosen.__name__.endswith("triton"):  # type: ignore[attr-defined]
                reason = backends._unsupported_reason("triton", operator, doctor.device, dtype)
                raise AssertionError(f"{operator} for {dtype} runs in {chosen}: {reason}")
    return "Triton for every operator and dtype"


def check_accuracy(doctor: Doctor) -> str:
    """Outputs and gradients of every operator, dtype, combine and path against float64; memory is NaN beforehand."""
    count = 0
    dtypes = (torch.float32, torch.bfloat16) if doctor.dry else (torch.float32, torch.float16, torch.bfloat16)
    for grid in ((1, 1), (2, 3)) if doctor.dry else GRIDS:
        for operator in OPERATORS:
            for dtype in dtypes:
                for options in _calls(operator, doctor.dry):
                    _assert_accurate(doctor, operator, doctor.inputs(grid, dtype=dtype), options)
                    count += 1
    return f"{count} cases"


def _assert_accurate(doctor: Doctor, operator: str, tensors: list[Tensor], options: dict[str, Any]) -> None:
    given = [tensors[2], *tensors[3:]] if operator == "polyline_scan" else tensors
    function = getattr(ppma, operator)
    fast = partial(function, backend=doctor.backend, **options)
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        assert_accurate(fast, partial(function, backend="torch", **options), given, ROUNDINGS)
    except AssertionError as error:
        raise AssertionError(f"{operator} {tuple(given[0].shape)} {given[0].dtype} {options}: {error}") from error
    finally:
        torch.use_deterministic_algorithms(False)


def check_block(doctor: Doctor) -> str:
    """What is fused around the attention, against float64: rotary embeddings, decay heads, convolutions."""
    return doctor_block.run(doctor.device, doctor.backend, ((2, 3),) if doctor.dry else GRIDS)


def check_channels(doctor: Doctor) -> str:
    """Heads of 16 to 160 channels."""
    tried = CHANNELS[:2] if doctor.dry else CHANNELS
    for d in tried:
        for operator in ("polyline_attention", "criss_cross_attention"):
            _assert_accurate(doctor, operator, doctor.inputs((3, 4) if doctor.dry else (14, 14), d), {})
    return ", ".join(map(str, tried))


def check_gradient_strides(doctor: Doctor) -> str:
    """Output gradients that are expanded, strided and packed give the same result."""
    tensors = [tensor.detach().requires_grad_() for tensor in doctor.inputs((3, 4))]
    out = _run("polyline_attention", tensors, doctor.backend)
    ones = torch.ones_like(out)
    forms = (
        ones,
        torch.ones((), device=doctor.device).expand(out.shape),
        ones.movedim(1, -2).contiguous().movedim(-2, 1),
    )
    results = [torch.autograd.grad(out, tensors, form, retain_graph=True) for form in forms]
    for other in results[1:]:
        assert all(a.equal(b) for a, b in zip(results[0], other, strict=True)), "gradients depend on the strides"
    return f"{len(forms)} layouts"


def check_repeatable(doctor: Doctor) -> str:
    """Ten runs give the same bits."""
    repeats = 2 if doctor.dry else 10
    for operator in OPERATORS:
        tensors = [t.detach().requires_grad_() for t in doctor.inputs((2, 3) if doctor.dry else (28, 28))]
        runs = []
        for _ in range(repeats):
            out = _run(operator, tensors, doctor.backend)
            used = [
                tensor for tensor in tensors if operator != "polyline_scan" or tensor.ndim == 4 or tensor is tensors[2]
            ]
            runs.append((out, *torch.autograd.grad(out.sum(), used)))
        assert all(a.equal(b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True)), operator
    return f"{repeats} runs of {len(OPERATORS)} operators"


def check_other_device(doctor: Doctor) -> str:
    """Tensors on cuda:1 while cuda:0 is current."""
    doctor.needs_gpu()
    if torch.cuda.device_count() < 2:
        raise SkippedError("there is one GPU")
    tensors = doctor.inputs((14, 14))
    expected = _run("polyline_attention", tensors, "auto")
    with torch.cuda.device(0):
        out = _run("polyline_attention", [tensor.to("cuda:1") for tensor in tensors], "auto")
    assert out.device.index == 1
    assert out.to(expected.device).equal(expected)
    return "same bits on cuda:1"


def check_stream_and_graph(doctor: Doctor) -> str:
    """A side stream, and capture and replay of a CUDA graph."""
    doctor.needs_gpu()
    tensors = doctor.inputs((14, 14))
    expected = _run("polyline_attention", tensors, "auto")
    stream = torch.cuda.Stream(doctor.device)
    with torch.cuda.stream(stream):
        aside = _run("polyline_attention", tensors, "auto")
    stream.synchronize()
    assert aside.equal(expected), "another result on a side stream"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _run("polyline_attention", tensors, "auto")
    tensors[2].mul_(2)
    graph.replay()
    torch.cuda.synchronize(doctor.device)
    torch.testing.assert_close(captured, 2 * expected)
    return "stream, capture and replay"


def check_extremes(doctor: Doctor) -> str:
    """float16 training with scores of 1e4, decays of exactly 0 and a loss scale of 2^12 keeps finite gradients."""
    for operator in ("polyline_attention", "criss_cross_attention"):
        for combine in ("hadamard", "logit"):
            q, k, v, *decays = doctor.inputs((2, 3) if doctor.dry else (14, 14), dtype=torch.float16)
            tensors = [t.detach().requires_grad_() for t in (q * 60, k * 60, v, *decays)]
            out = _run(operator, tensors, doctor.backend, combine=combine)
            grads = torch.autograd.grad((out.float().mean() * 2**12), tensors)
            assert all(tensor.isfinite().all() for tensor in (out, *grads)), f"{operator}, {combine}: not finite"
    return "finite"


def check_large(doctor: Doctor) -> str:
    """More than 2^31 elements in one tensor."""
    doctor.needs_gpu()
    heads, side, d = 8, 128, 128
    batch = 2**31 // (heads * side * side * d) + 1
    free, _ = torch.cuda.mem_get_info(doctor.device)
    if free < 12 * 2**31:
        raise SkippedError(f"needs 24 GB of free memory, has {free >> 30}")
    x = torch.randn(batch, heads, side, side, d, device=doctor.device, dtype=torch.float16)
    decay = -torch.rand(batch, heads, side, side, device=doctor.device)
    out = ppma.polyline_scan(x, decay, decay)
    expected = ppma.polyline_scan(x[-1:], decay[-1:], decay[-1:])
    assert out[-1:].equal(expected), "the last image differs"
    return f"{x.numel():,} elements"


def check_compile(doctor: Doctor) -> str:
    """torch.compile of a whole graph, with gradients; on a GPU with CUDA graphs too."""
    modes: list[dict[str, Any]] = [{"backend": "aot_eager"}]
    if not doctor.dry:
        modes += [{}, {"mode": "reduce-overhead"}]
    tensors = [tensor.detach().requires_grad_() for tensor in doctor.inputs((2, 3) if doctor.dry else (14, 14))]
    function = partial(ppma.polyline_attention, backend=doctor.backend)
    expected = torch.autograd.grad(function(*tensors).sum(), tensors)
    for mode in modes:
        compiled = torch.compile(function, fullgraph=True, **mode)
        for one, other in zip(torch.autograd.grad(compiled(*tensors).sum(), tensors), expected, strict=True):
            torch.testing.assert_close(one, other)
    return ", ".join(str(mode or "inductor") for mode in modes)


def compiled_kernels() -> int:
    """How many variants of the kernels Triton holds, compiled or loaded from disk."""
    modules = [module for name, module in sys.modules.items() if name.startswith("ppma.ops.backends.triton.")]
    kernels = {
        id(value): value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)
    }
    return sum(len(caches[0]) for kernel in kernels.values() for caches in kernel.device_caches.values())


def check_image_sizes(doctor: Doctor) -> str:
    """Another image size compiles nothing; how long both take the first time."""
    doctor.needs_gpu()
    model = timm.create_model("ppma_tiny").to(doctor.device).eval()
    found = []
    for size in (224, 256):
        start = time.perf_counter()
        ppma.warmup(model, [(size, size)], dtype=torch.bfloat16)
        torch.cuda.synchronize(doctor.device)
        found.append((compiled_kernels(), time.perf_counter() - start))
    (kernels, first), (more, second) = found
    assert more == kernels, f"256 x 256 compiled {more - kernels} kernels after 224 x 224"
    return f"224: {kernels} kernels, {first:.1f} s; 256: none more, {second:.1f} s"


def check_ddp(doctor: Doctor) -> str:
    """Two ranks of DistributedDataParallel have the gradients of the whole batch."""
    if not doctor.dry and torch.cuda.device_count() < 2:
        raise SkippedError("there is one GPU")
    doctor_ddp.run(doctor.dry)
    return "2 ranks"


def check_timings(doctor: Doctor) -> str:
    """Timings with a mask, without one and of PyTorch's attention."""
    doctor.needs_gpu()
    doctor.reports += measure.run(str(doctor.device))
    return "in the tables below"


def check_profile(doctor: Doctor) -> str:
    """A profile of one training step."""
    model = timm.create_model("ppma_tiny", depths=(1, 1, 1, 1) if doctor.dry else (2, 2, 8, 2)).to(doctor.device)
    images = torch.randn(1 if doctor.dry else 64, 3, *(2 * [64 if doctor.dry else 224]), device=doctor.device)
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (not doctor.dry)
    with torch.profiler.profile(activities=kinds) as profile, torch.autocast(doctor.device.type, torch.bfloat16):
        model(images).float().sum().backward()
    attribute = "self_cpu_time_total" if doctor.dry else "self_device_time_total"
    events = sorted(profile.key_averages(), key=lambda event: -getattr(event, attribute))
    report = Report("Profile of one training step", ["operation", "calls", "us"])
    report.rows += [[event.key[:80], event.count, float(getattr(event, attribute))] for event in events[:25]]
    doctor.reports.append(report)
    return "in the table below"


CHECKS: tuple[Callable[[Doctor], str], ...] = (
    check_environment, check_backend, check_accuracy, check_block, check_channels, check_gradient_strides,
    check_repeatable, check_other_device, check_stream_and_graph, check_extremes, check_large, check_compile,
    check_image_sizes, check_ddp, check_timings, check_profile,
)  # fmt: skip


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
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result, detail = "passed", check(doctor)
            except SkippedError as reason:
                result, detail = "skipped", str(reason)
            except Exception as error:  # a check that breaks must not hide the others
                result, detail = "FAILED", " ".join(f"{type(error).__name__}: {error}".split())
                details.append(f"### {name}\n\n```\n{traceback.format_exc()}```")
        fallbacks = [str(warning.message) for warning in caught if "runs in plain PyTorch" in str(warning.message)]
        if fallbacks and result == "passed" and check is not check_channels:
            result, detail = "FAILED", f"fell back: {fallbacks[0]}"
        table.rows.append([name, result, time.perf_counter() - start, detail.replace("|", "/")])
        tell(f"{result:8} {name}: {detail}")
    parts = [table.markdown(), *(report.markdown() for report in doctor.reports), *details]
    return "\n\n".join(parts) + "\n", all(row[1] != "FAILED" for row in table.rows)

"""Compare a model with the time of its matrix products and convolutions alone, its floor.

The model runs once while every matrix product and convolution is recorded by shape and memory layout; masked attention
counts as the products of plain attention of the same shape. The floor is the time PyTorch takes to run just those on
preallocated buffers, without norms, activations, softmax or mask.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ppma
from ppma.bench.report import Report
from ppma.measure.timing import interleave
from ppma.ops import backends
from ppma.ops.options import split_paths

aten = torch.ops.aten


@dataclass
class Products(TorchDispatchMode):
    """Records the matrix products and convolutions of a model.

    Attributes:
        calls: functions that repeat them, in order.
    """

    calls: list[Callable[[], Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (aten.mm, aten.addmm, aten.bmm, aten.convolution, aten.linear):
            copies = [_like(a) if isinstance(a, Tensor) else a for a in args]
            self.calls.append(lambda: func(*copies))
        elif func is torch.ops.ppma.polyline_attention.default:
            self._attention(args[0].flatten(2, 3), args[2].flatten(2, 3), 1)
        elif func is torch.ops.ppma.criss_cross_attention.default:
            paths = len(split_paths(args[6]))
            self._attention(args[0], args[2], paths)
            self._attention(args[0].transpose(2, 3), args[2].transpose(2, 3), paths)
        return out

    def _attention(self, q: Tensor, v: Tensor, applications: int) -> None:
        """Record q k^T, and weights times values once per application."""
        lines, n = q.shape[:-2].numel(), q.shape[-2]
        queries, values = torch.randn(lines, n, q.shape[-1]), torch.randn(lines, n, v.shape[-1])
        weights = torch.rand(lines, n, n)
        self.calls.append(lambda: torch.bmm(queries, queries.mT))
        self.calls.extend([lambda: torch.bmm(weights, values)] * applications)


def _like(tensor: Tensor) -> Tensor:
    out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return out.normal_() if tensor.dtype.is_floating_point else out.copy_(tensor)


def record(model: torch.nn.Module, images: Tensor) -> list[Callable[[], Tensor]]:
    """The products and convolutions of one forward pass with plain PyTorch kernels."""
    with torch.no_grad(), backends.excluding("native"), Products() as products:
        model(images)
    return products.calls


def suite(model: str = "ppma_tiny", *, batch: int = 8, size: int = 224, rounds: int = 9) -> Iterator[Report]:
    """Compare inference with the floor in both formulations, and profile it by operator."""
    images = torch.randn(batch, 3, size, size)
    report = Report(
        f"floor of inference, batch {batch}, {size} x {size}",
        ["model", "formulation", "speed of the model over its floor", "model ms", "floor ms", "products"],
    )
    where: dict[str, dict[str, float]] = {}
    for formulation in ("paper", "release"):
        torch.manual_seed(0)
        plain = timm.create_model(model, formulation=formulation).eval()
        calls = record(plain, images)
        fast = ppma.optimize_for_inference(plain)

        def run(fast: torch.nn.Module = fast) -> object:
            with torch.inference_mode():
                return fast(images)

        def floor(calls: list = calls) -> None:
            with torch.inference_mode():
                for call in calls:
                    call()

        timings = interleave({"model": run, "floor": floor}, rounds=rounds, label=f"floor, {formulation}")
        medians = (1e3 * timings.median(name) for name in ("model", "floor"))
        report.rows.append([model, formulation, timings.speed("model", "floor"), *medians, len(calls)])
        where[formulation] = breakdown(run)
    report.notes.append(f"memcpy: {bandwidth():.1f} GB/s, read plus written (256 MB tensor).")
    yield report
    yield _breakdown_report(where)


def breakdown(run: Callable[[], object], passes: int = 5) -> dict[str, float]:
    """Milliseconds of one pass by operator, self time, from PyTorch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(passes):
            run()
    return {event.key: event.self_cpu_time_total / 1e3 / passes for event in profile.key_averages()}


def _breakdown_report(where: dict[str, dict[str, float]]) -> Report:
    report = Report("inference time by operator, ms", ["operator", *where])
    longest: dict[str, float] = {}
    for times in where.values():
        longest = {name: max(longest.get(name, 0.0), times.get(name, 0.0)) for name in {*longest, *times}}
    total = max(sum(times.values()) for times in where.values())
    shown = sorted((name for name, time in longest.items() if time >= 0.01 * total), key=lambda name: -longest[name])
    for name in shown:
        report.rows.append([name, *(times.get(name, 0.0) for times in where.values())])
    report.rows.append(
        ["everything else", *(sum(t for n, t in times.items() if n not in shown) for times in where.values())]
    )
    return report


def bandwidth() -> float:
    """Memory bandwidth in GB/s, read plus written, of copying a large tensor."""
    source, target = torch.zeros(2, 64 << 20).unbind(0)
    seconds = interleave({"copy": lambda: target.copy_(source)}, rounds=5).median("copy")
    return 2 * source.nbytes / seconds / 1e9

"""Compare a model with the time of its matrix products and convolutions alone, its floor.

The model runs once while every matrix product and convolution is recorded by shape and memory layout; masked attention
counts as the products of plain attention of the same shape. The floor is the time of just those, without norms,
activations, softmax or mask. Each runs by the fastest implementation for its shape, by measurement: linear layers by
MKL, oneDNN or our packed product, convolutions by PyTorch or our kernels, the products of attention by PyTorch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import ppma
from ppma.bench.report import Report
from ppma.layers.fused import block_choices
from ppma.measure.timing import interleave
from ppma.ops import backends, fused_conv, fused_linear
from ppma.ops.backends import native
from ppma.ops.choice import fastest
from ppma.ops.fused_linear import PACKED, products
from ppma.ops.options import split_paths

aten = torch.ops.aten


@dataclass
class Products(TorchDispatchMode):
    """Records the matrix products and convolutions of a model.

    Attributes:
        calls: functions that repeat them, in order.
        chosen: the implementation by shape, (rows, inputs, outputs) for linear layers, those of image and weight and
            the strides for convolutions.
    """

    calls: list[Callable[[], Tensor]] = field(default_factory=list)
    chosen: dict[tuple[int, ...], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is aten.convolution.default:
            self._convolution(*args)
        elif func.overloadpacket in (aten.mm, aten.addmm, aten.bmm, aten.linear):
            copies = [_like(a) if isinstance(a, Tensor) else a for a in args]
            plain = func.overloadpacket in (aten.addmm, aten.mm) and not kwargs and copies[-1].mT.is_contiguous()
            self.calls.append(self._linear(copies[-2], copies[-1], copies[:-2]) if plain else lambda: func(*copies))
        elif func is torch.ops.ppma.polyline_attention.default:
            self._attention(args[0].flatten(2, 3), args[2].flatten(2, 3), 1)
        elif func is torch.ops.ppma.criss_cross_attention.default:
            paths = len(split_paths(args[6]))
            self._attention(args[0], args[2], paths)
            self._attention(args[0].transpose(2, 3), args[2].transpose(2, 3), paths)
        return out

    def _linear(self, x: Tensor, transposed: Tensor, biases: list[Tensor]) -> Callable[[], Tensor]:
        """The fastest implementation of `x transposed + bias`."""
        weight, bias = transposed.mT, biases[0] if biases else None
        candidates = {name: partial(product, x, weight, bias) for name, product in products().items()}
        if native.unsupported_reason(x.device, x.dtype) is None:
            shift = x.new_zeros(len(weight)) if bias is None else bias
            candidates[PACKED] = partial(native.fused_linear, x, weight, shift, None, None, None, 0, {})
        return self._fastest((*x.shape, len(weight)), candidates)

    def _fastest(self, shape: tuple[int, ...], candidates: Mapping[str, Callable[[], Tensor]]) -> Callable[[], Tensor]:
        if shape not in self.chosen:
            with torch.no_grad(), _disable_current_modes():
                self.chosen[shape] = fastest(candidates, margin=1.0)
        return candidates[self.chosen[shape]]

    def _convolution(self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], *rest: Any) -> None:
        x, weight = _like(x), _like(weight)
        bias = x.new_zeros(len(weight)) if bias is None else _like(bias)
        groups = rest[-1]
        candidates: dict[str, Callable[[], Tensor]] = {
            "torch": lambda: aten.convolution(x, weight, bias, stride, *rest)
        }
        if native.unsupported_reason(x.device, x.dtype) is None:
            image = x.permute(0, 2, 3, 1)
            if groups == len(weight) and weight.shape[-1] in (3, 5):
                candidates["native"] = partial(native.depthwise_conv, image, weight, bias, None, False)
            elif groups == 1 and weight.shape[-1] == 3:
                candidates[PACKED] = partial(native.fused_conv, image, weight, bias, stride[0], False, {})
        self.calls.append(self._fastest((*x.shape, *weight.shape, *stride), candidates))

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


def record(model: torch.nn.Module, images: Tensor) -> Products:
    """The products and convolutions of one forward pass."""
    with torch.no_grad(), backends.excluding("native"), Products() as recorded:
        model(images)
    return recorded


def run_all(recorded: Products) -> Callable[[], None]:
    """A function that repeats the products."""

    def run() -> None:
        with torch.inference_mode():
            for call in recorded.calls:
                call()

    return run


def suite(model: str = "ppma_tiny", *, batch: int = 8, size: int = 224, rounds: int = 9) -> Iterator[Report]:
    """Compare inference with the floor in both formulations, and profile it by operator."""
    images = torch.randn(batch, 3, size, size)
    report = Report(
        f"floor of inference, batch {batch}, {size} x {size}",
        ["model", "formulation", "speed of the model over its floor", "model ms", "floor ms", "products"],
    )
    where: dict[str, dict[str, float]] = {}
    used: dict[tuple[int, ...], str] = {}
    for formulation in ("paper", "release"):
        torch.manual_seed(0)
        plain = timm.create_model(model, formulation=formulation).eval()
        recorded = record(plain, images)
        fast = ppma.optimize_for_inference(plain)

        def run(fast: torch.nn.Module = fast) -> object:
            with torch.inference_mode():
                return fast(images)

        timings = interleave({"model": run, "floor": run_all(recorded)}, rounds=rounds, label=f"floor, {formulation}")
        medians = (1e3 * timings.median(name) for name in ("model", "floor"))
        report.rows.append([model, formulation, timings.speed("model", "floor"), *medians, len(recorded.calls)])
        where[formulation] = breakdown(run)
        used.update(recorded.chosen)
    report.notes.append(f"memcpy: {bandwidth():.1f} GB/s, read plus written (256 MB tensor).")
    yield report
    yield _choices_report(used)
    yield _breakdown_report(where)


def _choices_report(floor: Mapping[tuple[int, ...], str]) -> Report:
    """The fastest implementation of each product and convolution of the floor, and what the model runs on."""
    report = Report("implementations, chosen by measurement", ["of", "what", "shape", "chosen"])
    for sizes, name in sorted(floor.items(), key=lambda item: (len(item[0]), item[0])):
        what = "linear" if len(sizes) == 3 else "convolution"
        report.rows.append(["floor", what, " x ".join(map(str, sizes)), name])
    for conv, name in fused_conv.choices().items():
        shape = f"{conv.pixels} pixels, {conv.inputs} to {conv.outputs}, stride {conv.stride}"
        report.rows.append(["model", "convolution", shape, name])
    for (batch, tokens, dim, kind, mask, formulation, *_), name in block_choices().items():
        shape = f"{batch} x {tokens} x {dim}, {kind}, {mask}, {formulation}"
        report.rows.append(["model", "block", shape, name])
    for linear, name in fused_linear.choices().items():
        shape = f"{linear.rows} x {linear.inputs} x {linear.outputs}"
        report.rows.append(["model", "linear, in steps", shape, name])
    report.notes.append(
        "packed, native, whole: our kernels; torch: PyTorch's operator, MKL or oneDNN on x86; onednn: oneDNN; steps: a "
        "block whose products are chosen one by one. The model's sizes are rounded down to powers of two."
    )
    return report


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

"""Operators at the shapes of PPMA-T/S/B: native and PyTorch backends, attention without a mask, copies."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import ppma
from ppma.bench.report import Report
from ppma.bench.unmasked import lines_without_mask, without_mask
from ppma.measure.timing import interleave
from ppma.ops.conv import conv3x3
from ppma.ops.options import BackendName


@dataclass(frozen=True)
class Shape:
    """Input shape of an attention call.

    Attributes:
        name: where it occurs.
        batch: batch size.
        heads: number of heads.
        side: grid side in tokens.
        d: channels per head.
    """

    name: str
    batch: int
    heads: int
    side: int
    d: int

    def __str__(self) -> str:
        return f"{self.name}: {self.side}x{self.side}, {self.heads} heads x {self.d}"

    def tensors(self, requires_grad: bool = False) -> list[Tensor]:
        """q, k, v as views of a packed (B, H, W, 3, heads, d) projection, and two log-decays (B, heads, H, W)."""
        generator = torch.Generator().manual_seed(0)
        packed = torch.randn(self.batch, self.side, self.side, 3, self.heads, self.d, generator=generator)
        q, k, v = packed.movedim(3, 0).movedim(-2, 2).unbind(0)
        grid = (self.batch, self.heads, self.side, self.side)
        decays = -torch.rand(2, *grid, generator=generator)
        return [t.requires_grad_(requires_grad) for t in (q, k, v, *decays)]


# 224 x 224 images: stages of PPMA-T/S (heads of 16 and 32 channels) and of PPMA-B (heads of 16 and 32).
CRISS_CROSS = [
    Shape("T/S stage 1", 8, 4, 56, 16),
    Shape("T/S stage 2", 8, 4, 28, 32),
    Shape("S stage 3", 8, 8, 14, 32),
    Shape("B stage 1", 8, 5, 56, 16),
    Shape("B stage 2", 8, 5, 28, 32),
]
FULL = [Shape("T stage 3", 8, 8, 14, 32), Shape("T/S/B stage 4", 8, 16, 7, 32), Shape("128x128 tokens", 1, 1, 128, 32)]
LINEAR = [Shape("stage 1", 8, 4, 56, 16), Shape("128x128 tokens", 1, 4, 128, 32)]
# Side of the input, channels, stride: stem and downsampling of PPMA-T at 224 x 224.
CONVOLUTIONS = [(112, 32, 32, 1), (112, 32, 64, 2), (56, 64, 64, 1), (56, 64, 128, 2), (28, 128, 256, 2)]


def _forward(function: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], object]:
    def run() -> object:
        with torch.inference_mode():
            return function(*tensors)

    return run


def _forward_backward(function: Callable[..., Tensor], shape: Shape) -> Callable[[], object]:
    tensors = shape.tensors(requires_grad=True)
    grad = torch.ones_like(function(*tensors))

    def run() -> object:
        return torch.autograd.grad(function(*tensors), tensors, grad, allow_unused=True)

    return run


def _contenders(function: Callable[..., Tensor], plain: Callable[..., Tensor] | None, **options: str) -> dict:
    named: dict[str, Callable[..., Tensor]] = {
        "native": lambda *t: function(*t, backend="native", **options),
        "torch": lambda *t: function(*t, backend="torch", **options),
    }
    if plain is not None:
        named["no mask (SDPA)"] = plain
    return named


def attention_report(
    title: str,
    function: Callable[..., Tensor],
    shapes: list[Shape],
    plain: Callable | None,
    rounds: int,
    **options: str,
) -> Report:
    """Time forward and forward + backward of one operator.

    Args:
        title: of the table.
        function: the operator.
        shapes: one pair of rows each.
        plain: the same attention without a mask; None if there is none.
        rounds: interleaved rounds.
        options: keyword arguments of the operator.
    """
    columns = ["shape", "pass", "native / torch", "native / no mask", "native ms", "torch ms", "no mask ms"]
    report = Report(title, columns)
    for shape in shapes:
        contenders = _contenders(function, plain, **options)
        passes = {
            "forward": {name: _forward(f, shape.tensors()) for name, f in contenders.items()},
            "forward + backward": {name: _forward_backward(f, shape) for name, f in contenders.items()},
        }
        for direction, runs in passes.items():
            timings = interleave(runs, rounds=rounds, label=f"{title}, {shape}, {direction}")
            unmasked = "no mask (SDPA)" if plain is not None else None
            report.rows.append(
                [
                    str(shape),
                    direction,
                    timings.speed("native", "torch"),
                    timings.speed("native", unmasked) if unmasked else "",
                    1e3 * timings.median("native"),
                    1e3 * timings.median("torch"),
                    1e3 * timings.median(unmasked) if unmasked else "",
                ]
            )
    return report


def scan_report(rounds: int) -> Report:
    """Compare polyline_scan with copying x, in time and bandwidth."""
    report = Report(
        "polyline_scan, 2D, forward",
        ["x", "native / torch", "native / memcpy", "bandwidth / memcpy's", "native ms", "torch ms", "memcpy ms"],
        notes=[
            "memcpy: x.clone(), one read and one write. The scan runs a forward and a backward pass: it reads x twice, "
            "writes the result twice and reads it once. Its bandwidth counts these five; a grid that stays in cache "
            "moves less."
        ],
    )
    for batch, side, channels in [(8, 56, 64), (1, 256, 64), (1, 1024, 32)]:
        x = torch.randn(batch, side, side, channels)
        decays = -torch.rand(2, batch, side, side)
        timings = interleave(
            {
                "native": _forward(lambda x, a, b: ppma.polyline_scan(x, a, b, backend="native"), [x, *decays]),
                "torch": _forward(lambda x, a, b: ppma.polyline_scan(x, a, b, backend="torch"), [x, *decays]),
                "memcpy": x.clone,
            },
            rounds=rounds,
            label=f"scan {tuple(x.shape)}",
        )
        report.rows.append(
            [
                str(tuple(x.shape)),
                timings.speed("native", "torch"),
                timings.speed("native", "memcpy"),
                timings.speed("native", "memcpy") * 5 / 2,
                *(1e3 * timings.median(name) for name in ("native", "torch", "memcpy")),
            ]
        )
    return report


def _weight_gradient(backend: BackendName, side: int, inputs: int, outputs: int, stride: int) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, side, side, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, 3, 3, generator=generator).requires_grad_()
    bias = torch.zeros(outputs, requires_grad=True)
    out = conv3x3(x, weight, bias, stride=stride, backend=backend)
    grad = torch.randn(out.shape, generator=generator)
    return lambda: torch.autograd.grad(out, (weight, bias), grad, retain_graph=True)


def convolution_report(rounds: int) -> Report:
    """The gradients of weight and bias of the convolutions in stem and downsampling."""
    report = Report(
        "conv3x3, gradients of weight and bias, batch 8",
        ["convolution", "native / torch", "native ms", "torch ms", "native GFLOP/s", "torch GFLOP/s"],
    )
    for side, inputs, outputs, stride in CONVOLUTIONS:
        name = f"{side}x{side}, {inputs} to {outputs}, stride {stride}"
        runs = {
            "native": _weight_gradient("native", side, inputs, outputs, stride),
            "torch": _weight_gradient("torch", side, inputs, outputs, stride),
        }
        timings = interleave(runs, rounds=rounds, label=f"conv3x3 {name}")
        gflop = 2e-9 * 8 * (side // stride) ** 2 * outputs * inputs * 9
        seconds = [timings.median(backend) for backend in runs]
        report.rows.append(
            [name, timings.speed("native", "torch"), *(1e3 * s for s in seconds), *(gflop / s for s in seconds)]
        )
    return report


def reference_report() -> Report:
    """Compare the native backend with the float64 reference on a small grid."""
    shape = Shape("small", 1, 1, 10, 16)
    tensors = shape.tensors()
    report = Report("the reference, 10 x 10 tokens", ["operator", "native / reference", "reference ms"])
    for function in (ppma.polyline_attention, ppma.criss_cross_attention, ppma.linear_attention):
        timings = interleave(
            {
                name: _forward(lambda *t, f=function, b=name: f(*t, backend=b), tensors)
                for name in ("native", "reference")
            },
            rounds=3,
            label=f"reference {function.__name__}",
        )
        report.rows.append([function.__name__, timings.speed("native", "reference"), 1e3 * timings.median("reference")])
    return report


def suite(*, rounds: int = 9) -> Iterator[Report]:
    """Benchmark all operators."""
    for combine in ("hadamard", "logit"):
        for function, shapes, plain in (
            (ppma.criss_cross_attention, CRISS_CROSS, lines_without_mask),
            (ppma.polyline_attention, FULL, without_mask),
        ):
            yield attention_report(f"{function.__name__}, {combine}", function, shapes, plain, rounds, combine=combine)
    yield attention_report("linear_attention", ppma.linear_attention, LINEAR, None, rounds)
    yield scan_report(rounds)
    yield convolution_report(rounds)
    yield reference_report()

"""Checks of results: every operator against float64, the same bits again, extremes."""

import contextlib
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import ppma
from ppma.bench.gpu import doctor_block
from ppma.bench.gpu.doctor_context import OPERATORS, Doctor, arguments, run
from ppma.layers import PolylineAttention
from ppma.ops import backends
from ppma.ops.backends.triton.launch import WIDEST_HEAD
from ppma.testing import assert_accurate

AROUND = ("rotary_split", "decay_head", "depthwise_conv")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GRIDS = ((1, 1), (7, 7), (14, 14), (13, 29), (56, 56), (65, 130))
# Heads of every tile width, and one that the kernels leave to PyTorch.
CHANNELS = (16, 20, 32, 64, 128, 160)
# Roundings of the working precision that may add up on the way to a result, as in the tests of the kernels.
ROUNDINGS = 8


def check_backend(doctor: Doctor) -> str:
    """The backend "auto" runs the Triton kernels and does not fall back."""
    for operator in (*OPERATORS, *AROUND):
        for dtype in DTYPES:
            chosen = backends.resolve(doctor.backend, operator, doctor.device, dtype)
            if not chosen.__name__.endswith("triton"):  # type: ignore[attr-defined]
                reason = backends._unsupported_reason("triton", operator, doctor.device, dtype)
                raise AssertionError(f"{operator} for {dtype} runs in {chosen}: {reason}")
    return "Triton for every operator and dtype"


def _calls(operator: str, dry: bool) -> Iterator[dict[str, str]]:
    """Options of an operator."""
    combines = ("hadamard", "logit") if operator in ("polyline_attention", "criss_cross_attention") else (None,)
    for combine in combines:
        for paths in ("2d",) if dry else ("v2h", "h2v", "2d"):
            yield {"paths": paths} if combine is None else {"paths": paths, "combine": combine}


def check_accuracy(doctor: Doctor) -> str:
    """Outputs and gradients of every operator, dtype, combine and path against float64; memory is NaN beforehand."""
    count = 0
    for grid in ((1, 1), (2, 3)) if doctor.dry else GRIDS:
        for operator in OPERATORS:
            for dtype in DTYPES[::2] if doctor.dry else DTYPES:
                for options in _calls(operator, doctor.dry):
                    _assert_accurate(doctor, operator, doctor.inputs(grid, dtype=dtype), options)
                    count += 1
    return f"{count} cases"


@contextlib.contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Inside, new memory is NaN: PyTorch fills it so in deterministic mode.

    It only warns of the operations without a deterministic form, among them every product of cuBLAS as it is set up.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _assert_accurate(doctor: Doctor, operator: str, tensors: list[Tensor], options: dict[str, Any]) -> None:
    given = arguments(operator, tensors)
    function = getattr(ppma, operator)
    fast = partial(function, backend=doctor.backend, **options)
    try:
        with _poisoned_memory():
            assert_accurate(fast, partial(function, backend="torch", **options), given, ROUNDINGS)
    except AssertionError as error:
        raise AssertionError(f"{operator} {tuple(given[0].shape)} {given[0].dtype} {options}: {error}") from error


def check_block(doctor: Doctor) -> str:
    """What is fused around the attention, against float64: rotary embeddings, decay heads, convolutions."""
    with _poisoned_memory():
        return doctor_block.run(doctor.device, doctor.backend, ((2, 3),) if doctor.dry else GRIDS)


def check_channels(doctor: Doctor) -> str:
    """Heads of 16 to 160 channels; those that are too wide for a tile run in PyTorch, no others."""
    tried = CHANNELS[:2] if doctor.dry else CHANNELS
    for d in tried:
        with warnings.catch_warnings():
            if d > WIDEST_HEAD:
                warnings.simplefilter("ignore")
            for operator in ("polyline_attention", "criss_cross_attention"):
                _assert_accurate(doctor, operator, doctor.inputs((3, 4) if doctor.dry else (14, 14), d), {})
    return ", ".join(map(str, tried))


def check_gradient_strides(doctor: Doctor) -> str:
    """Output gradients that are contiguous, expanded, strided and packed give the same bits."""
    forms = 4
    for operator in OPERATORS:
        inputs = doctor.inputs((3, 4) if doctor.dry else (14, 14), dtype=torch.bfloat16)
        tensors = [tensor.detach().requires_grad_() for tensor in inputs]
        out = run(operator, tensors, doctor.backend)
        ones = torch.ones(out.shape, dtype=out.dtype, device=out.device)
        gradients = (
            ones,
            ones[:1, :1, :1, :1, :1].expand(out.shape),
            ones.transpose(2, 3).contiguous().transpose(2, 3),
            torch.stack([ones, ones + 1], 3).select(3, 0),
        )
        results = [torch.autograd.grad(out, arguments(operator, tensors), g, retain_graph=True) for g in gradients]
        for other in results[1:]:
            same = all(a.equal(b) for a, b in zip(results[0], other, strict=True))
            assert same, f"{operator}: gradients depend on the strides of the output gradient"
        assert len(gradients) == forms
    return f"{forms} layouts, {len(OPERATORS)} operators"


def check_repeatable(doctor: Doctor) -> str:
    """Ten runs give the same bits."""
    repeats = 2 if doctor.dry else 10
    for operator in OPERATORS:
        tensors = [t.detach().requires_grad_() for t in doctor.inputs((2, 3) if doctor.dry else (28, 28))]
        runs = []
        for _ in range(repeats):
            out = run(operator, tensors, doctor.backend)
            runs.append((out, *torch.autograd.grad(out.sum(), arguments(operator, tensors))))
        assert all(a.equal(b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True)), operator
    return f"{repeats} runs of {len(OPERATORS)} operators"


def check_extremes(doctor: Doctor) -> str:
    """float16 with scores of 1e4, decays of exactly 0 and a loss scale of 2^12: finite gradients, no step skipped."""
    for operator in ("polyline_attention", "criss_cross_attention"):
        for combine in ("hadamard", "logit"):
            q, k, v, *decays = doctor.inputs((2, 3) if doctor.dry else (14, 14), dtype=torch.float16)
            tensors = [t.detach().requires_grad_() for t in (q * 60, k * 60, v, *decays)]
            out = run(operator, tensors, doctor.backend, combine=combine)
            grads = torch.autograd.grad((out.float().mean() * 2**12), tensors)
            assert all(tensor.isfinite().all() for tensor in (out, *grads)), f"{operator}, {combine}: not finite"
    torch.manual_seed(0)
    layer = PolylineAttention(32, heads=2, rope=True, backend=doctor.backend).to(doctor.device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    kind = doctor.device.type
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**12)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    with torch.autocast(kind, torch.float16):
        out = layer(30 * torch.randn(2, *((2, 3) if doctor.dry else (14, 14)), 32, device=doctor.device))
    scaler.scale(out.float().square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    moved = any(not a.equal(b) for a, b in zip(layer.parameters(), before, strict=True))
    assert moved, "GradScaler skipped the step"
    assert scaler.get_scale() == 2.0**12, f"GradScaler lowered its scale to {scaler.get_scale()}"
    return "finite; GradScaler took its step"

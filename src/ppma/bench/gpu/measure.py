"""On a GPU: masked attention beside attention without a mask and beside plain PyTorch; operators and whole models."""

from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import Tensor

import ppma
import ppma.models
from ppma.bench.gpu.prediction import BATCH, Stage, block_kinds
from ppma.bench.report import Report
from ppma.bench.unmasked import lines_without_mask, without_mask
from ppma.measure.timing import interleave
from ppma.ops import backends
from ppma.ops.options import Combine

Run = Callable[[], object]


def run(device: str = "cuda", *, rounds: int = 9, batch: int = BATCH) -> list[Report]:
    """Measure operators and models on a GPU.

    Args:
        device: "cuda" or "cuda:N"; ROCm devices have that name too.
        rounds: interleaved rounds.
        batch: images in a step.

    Raises:
        ValueError: there is no such GPU.
    """
    target = find_gpu(device)
    with torch.cuda.device(target):
        operators = [operator_report(stage, combine, target, rounds, batch)
                     for stage in block_kinds() for combine in ("hadamard", "logit")]  # fmt: skip
        models = [model_report(name, mode, target, rounds, batch)
                  for name in ("ppma_tiny", "ppma_small", "ppma_base") for mode in ("inference", "train")]  # fmt: skip
    return operators + models


def find_gpu(device: str) -> torch.device:
    """The GPU of this name.

    Raises:
        ValueError: there is none.
    """
    target = torch.device(device)
    if target.type != "cuda":
        raise ValueError(f"device: expected cuda, got {device}")
    if not torch.cuda.is_available():
        raise ValueError(f"device: expected a GPU for {device}, got a machine where PyTorch finds none")
    if (target.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: expected one of {torch.cuda.device_count()} GPUs, got {device}")
    return target


def operator_report(stage: Stage, combine: Combine, device: torch.device, rounds: int, batch: int) -> Report:
    """One attention block's operator, bfloat16."""
    masked = ppma.polyline_attention if stage.full else ppma.criss_cross_attention
    plain = without_mask if stage.full else lines_without_mask
    functions: dict[str, Callable[..., Tensor]] = {
        "masked, Triton": lambda *tensors: masked(*tensors, combine=combine, backend="triton"),
        "masked, PyTorch": lambda *tensors: masked(*tensors, combine=combine, backend="torch"),
        "no mask": plain,
    }
    name = f"{'full' if stage.full else 'criss-cross'} {stage.side}x{stage.side}, {stage.heads} x {stage.d}, {combine}"
    report = Report(f"{name}, batch {batch}", ["pass", "attention", "speed of Triton over it", "us", "peak MB"])
    for backward in (False, True):
        runs = {key: _operator(function, stage, device, batch, backward) for key, function in functions.items()}
        _add_rows(report, runs, "forward + backward" if backward else "forward", device, rounds)
    return report


def _operator(function: Callable[..., Tensor], stage: Stage, device: torch.device, batch: int, backward: bool) -> Run:
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, stage.side, stage.side, 3, stage.heads, stage.d)
    packed = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    q, k, v = packed.movedim(3, 0).movedim(-2, 2).unbind(0)
    decays = -torch.rand((2, *q.shape[:-1]), generator=generator, device=device)
    tensors = [tensor.detach().requires_grad_(backward) for tensor in (q, k, v, *decays)]
    if not backward:
        return lambda: function(*tensors)
    grad = torch.ones_like(function(*tensors))
    return lambda: torch.autograd.grad(function(*tensors), tensors, grad, allow_unused=True)


def model_report(name: str, mode: str, device: torch.device, rounds: int, batch: int) -> Report:
    """A whole model, under autocast to bfloat16."""
    report = Report(f"{name}, {mode}, batch {batch}", ["pass", "model", "speed of Triton over it", "us", "peak MB"])
    options: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "masked, Triton": ({}, ()),
        "masked, PyTorch": ({}, ("triton",)),
        "no mask": ({"mask": "none"}, ()),
    }
    runs = {key: _model(name, mode, device, batch, *values) for key, values in options.items()}
    _add_rows(report, runs, mode, device, rounds)
    return report


def _model(
    name: str, mode: str, device: torch.device, batch: int, options: dict[str, Any], excluded: tuple[str, ...]
) -> Run:
    model = timm.create_model(name, **options).to(device).train(mode == "train")
    images = torch.randn((batch, 3, 224, 224), device=device)

    def step() -> object:
        with backends.excluding(*excluded):  # the backward picks its backend when it runs
            with torch.autocast("cuda", torch.bfloat16), torch.inference_mode(mode == "inference"):
                loss = model(images).float().square().mean()
            if mode == "train":
                model.zero_grad(set_to_none=False)
                loss.backward()
            return loss

    return step


def _add_rows(report: Report, runs: dict[str, Run], label: str, device: torch.device, rounds: int) -> None:
    """Time the contenders in turns, then measure the memory of each alone."""
    timings = interleave(runs, rounds=rounds, device=device, label=f"{report.title}, {label}")
    first = next(iter(runs))
    for name, call in runs.items():
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        report.rows.append([label, name, timings.speed(first, name), 1e6 * timings.median(name), peak / 1e6])

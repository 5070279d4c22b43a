"""On a GPU: masked attention beside attention without a mask and beside plain PyTorch; operators and whole models.

The kernels of an operator are also timed by themselves, with their mask and compiled without one: what the mask costs
on the GPU, the host left out. Their values are of no use, because nothing ran before the backward pass.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor

import ppma
import ppma.models
from ppma.bench.gpu import cases
from ppma.bench.gpu.prediction import BATCH, Stage, block_kinds
from ppma.bench.gpu.work import without_mask as kernel_without_mask
from ppma.bench.report import Report, Value
from ppma.bench.unmasked import lines_without_mask, without_mask
from ppma.measure.timing import interleave
from ppma.ops import backends
from ppma.ops.backends.contract import Five
from ppma.ops.backends.triton.launch import Launch, recording
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


def operator_report(
    stage: Stage, combine: Combine, device: torch.device, rounds: int, batch: int, shortest: float = 0.02
) -> Report:
    """One attention block's operator, bfloat16."""
    masked = ppma.polyline_attention if stage.full else ppma.criss_cross_attention
    plain = without_mask if stage.full else lines_without_mask
    functions: dict[str, Callable[..., Tensor]] = {
        "masked, Triton": lambda *tensors: masked(*tensors, combine=combine, backend="triton"),
        "masked, PyTorch": lambda *tensors: masked(*tensors, combine=combine, backend="torch"),
        "no mask, PyTorch (SDPA)": plain,
    }
    name = f"{'full' if stage.full else 'criss-cross'} {stage.side}x{stage.side}, {stage.heads} x {stage.d}, {combine}"
    report = Report(f"{name}, batch {batch}", ["pass", "attention", "speed of Triton over it", "us", "peak MB"])
    for backward in (False, True):
        tensors = _inputs(stage, device, batch)
        runs = {key: _operator(function, tensors, backward) for key, function in functions.items()}
        for key, mask in (("kernels alone", True), ("kernels alone, no mask", False)):
            runs[key] = partial(replay, operator_launches(stage, combine, tensors, backward, mask))
        _add_rows(report, runs, "forward + backward" if backward else "forward", device, rounds, shortest)
    return report


def _inputs(stage: Stage, device: torch.device, batch: int) -> Five:
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, stage.side, stage.side, 3, stage.heads, stage.d)
    packed = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    q, k, v = packed.movedim(3, 0).movedim(-2, 2).unbind(0)
    log_alpha, log_beta = -torch.rand((2, *q.shape[:-1]), generator=generator, device=device)
    return q, k, v, log_alpha, log_beta


def _operator(function: Callable[..., Tensor], tensors: Five, backward: bool) -> Run:
    leaves = [tensor.detach().requires_grad_(backward) for tensor in tensors]
    if not backward:
        return lambda: function(*leaves)
    grad = torch.ones_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, grad, allow_unused=True)


def operator_launches(stage: Stage, combine: Combine, tensors: Five, backward: bool, mask: bool) -> list[Launch]:
    """The launches of an operator, of its backward pass too if asked for, with the mask or compiled without one."""
    record = cases.record_attention if stage.full else cases.record_criss_cross
    with recording() as launches:
        for direction in (False, True) if backward else (False,):
            record(tensors, combine, direction)
    return launches if mask else [bare for launch in launches if (bare := kernel_without_mask(launch)) is not None]


def replay(launches: Sequence[Launch]) -> None:
    """Run recorded launches."""
    for launch in launches:
        launch.kernel[launch.grid](**launch.arguments)


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


def _add_rows(
    report: Report, runs: dict[str, Run], label: str, device: torch.device, rounds: int, shortest: float = 0.02
) -> None:
    """Time the contenders in turns, then measure the memory of each alone."""
    timings = interleave(runs, rounds=rounds, shortest=shortest, device=device, label=f"{report.title}, {label}")
    first = next(iter(runs))
    for name, call in runs.items():
        row: list[Value] = [label, name, timings.speed(first, name), 1e6 * timings.median(name)]
        report.rows.append([*row, _peak(call, device) / 1e6 if device.type == "cuda" else float("nan")])


def _peak(call: Run, device: torch.device) -> int:
    """Bytes that a call allocates at a time."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before

"""Host time of the operators: everything that a call does before the driver takes a kernel, measured without a GPU.

The tensors are small and on the CPU. Triton binds the arguments of every launch and looks up the compiled kernel, as on
a GPU; only the driver's launch itself is left out.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

import ppma
from ppma.bench.gpu.targets import TARGETS, active
from ppma.bench.report import Report
from ppma.ops.backends import triton as backend

OPERATORS = ("polyline_attention", "criss_cross_attention")


def _supported(device: torch.device, dtype: torch.dtype) -> None:
    """Every tensor is."""


@contextmanager
def _without_driver(target: str) -> Iterator[list[str]]:
    """Triton compiles for `target` but launches nothing; the names of the kernels that it would launch."""
    run, launched = JITFunction.run, []

    def bind(self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        launched.append(self.__name__)
        return run(self, *arguments, grid=grid, warmup=True, **keywords)

    with (
        active(TARGETS[target]),
        mock.patch.object(JITFunction, "run", bind),
        mock.patch.object(backend, "unsupported_reason", _supported),
    ):
        yield launched


def _call(operator: str, backward: bool) -> Callable[[], object]:
    packed = torch.randn(1, 14, 14, 3, 8, 32, dtype=torch.bfloat16)
    q, k, v = packed.movedim(3, 0).movedim(-2, 2).unbind(0)
    decays = -torch.rand(2, 1, 8, 14, 14)
    tensors = [tensor.detach().requires_grad_(backward) for tensor in (q, k, v, *decays)]
    function = getattr(ppma, operator)
    if not backward:
        return lambda: function(*tensors, backend="triton")
    grad = torch.ones(v.shape, dtype=v.dtype)
    return lambda: torch.autograd.grad(function(*tensors, backend="triton"), tensors, grad)


def _microseconds(call: Callable[[], object], repeats: int, rounds: int) -> tuple[float, float]:
    """CPU time of a call in the fastest of some rounds, because other processes only add to it, and in the median."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(repeats):
            call()
        times.append((time.process_time() - start) / repeats)
    return 1e6 * min(times), 1e6 * statistics.median(times)


def host_report(target: str = "sm_80", *, repeats: int = 30, rounds: int = 9) -> Report:
    """Launches and host time of a call of each attention on a grid of 14 x 14.

    Args:
        target: name of `targets.TARGETS`, for which the kernels are compiled once.
        repeats: calls in a round.
        rounds: of which the fastest and the median are reported.
    """
    report = Report(
        f"Host time of an operator call, driver left out ({target})",
        ["operator", "pass", "launches", "us of CPU time", "median"],
        notes=[f"The fastest of {rounds} rounds of {repeats} calls, and the median round."],
    )
    with _without_driver(target) as launched:
        for operator in OPERATORS:
            for backward in (False, True):
                call = _call(operator, backward)
                call()  # compiles
                launched.clear()
                call()
                launches = len(launched)
                passes = "forward and backward" if backward else "forward"
                report.rows.append([operator, passes, launches, *_microseconds(call, repeats, rounds)])
    return report

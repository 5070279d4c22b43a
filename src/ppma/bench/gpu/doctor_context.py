"""Where the checks of `ppma doctor --gpu` run, and what they call."""

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import ppma
from ppma.bench.report import Report
from ppma.testing import random_log_decay

OPERATORS = ("polyline_scan", "polyline_attention", "criss_cross_attention", "linear_attention")


class SkippedError(Exception):
    """A check does not apply here; its text says why."""


@dataclass
class Doctor:
    """Where the checks run. A dry run takes the CPU and Triton's interpreter in place of the GPU.

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

    def on_device(self) -> contextlib.AbstractContextManager[object]:
        """Inside, the GPU is the current one."""
        return contextlib.nullcontext() if self.dry else torch.cuda.device(self.device)

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


def arguments(operator: str, tensors: list[Tensor]) -> list[Tensor]:
    """Those of `Doctor.inputs` that an operator takes."""
    return tensors[2:] if operator == "polyline_scan" else tensors


def run(operator: str, tensors: list[Tensor], backend: Any, **options: Any) -> Tensor:
    return getattr(ppma, operator)(*arguments(operator, tensors), backend=backend, **options)

"""Muon for parameters on the CPU."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from timm.optim import muon
from torch.optim import Optimizer


class CpuMuon(muon.Muon):
    """timm's Muon with float32 Newton-Schulz iterations.

    timm iterates in bfloat16, which CPUs without instructions for it emulate: there a step takes ten times as long.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        iteration = functools.partial(muon.zeropower_via_newtonschulz, dtype=torch.float32)
        with mock.patch.object(muon, "zeropower_via_newtonschulz", iteration):  # timm has no option for it
            return super().step(closure)


def for_cpu(optimizer: Optimizer) -> Optimizer:
    """`CpuMuon` in the place of timm's Muon; other optimizers as they are."""
    return CpuMuon(optimizer.param_groups, **optimizer.defaults) if type(optimizer) is muon.Muon else optimizer

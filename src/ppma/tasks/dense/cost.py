"""Multiply-adds of a dense model, with and without the attention products."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

ATTENTION = (
    torch.ops.ppma.polyline_attention,
    torch.ops.ppma.criss_cross_attention,
    torch.ops.ppma.linear_attention,
)

Model = TypeVar("Model", bound=nn.Module)


class Cost(NamedTuple):
    """Multiply-adds for one image, the "FLOPs" of most papers.

    Attributes:
        macs: all multiply-adds.
        macs_without_attention: without `q k^T` and `map v`, which some counters miss.
    """

    macs: int
    macs_without_attention: int


def count(model: Model, run: Callable[[Model], Any]) -> Cost:
    """Count the multiply-adds of `run` on the meta device.

    Args:
        model: not modified.
        run: called with a copy of the model, on the meta device and in evaluation mode.
    """
    shadow = copy.deepcopy(model).to("meta").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run(shadow)
    attention = sum(counter.get_flop_counts()["Global"].get(operator, 0) for operator in ATTENTION)
    total = counter.get_total_flops()
    return Cost(total // 2, (total - attention) // 2)

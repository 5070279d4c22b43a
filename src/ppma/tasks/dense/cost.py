"""Multiply-adds of a dense model, with and without the products of attention."""

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
    """Multiply-adds of one image; papers call them FLOPs.

    Attributes:
        macs: all of them.
        macs_without_attention: without `q k^T` and `map v`, which some counters do not see.
    """

    macs: int
    macs_without_attention: int


def count(model: Model, run: Callable[[Model], Any]) -> Cost:
    """Count what `run` computes with a copy of the model on the meta device, where nothing is computed.

    Args:
        model: is left as it is.
        run: takes the copy, in evaluation mode.
    """
    shadow = copy.deepcopy(model).to("meta").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run(shadow)
    attention = sum(counter.get_flop_counts()["Global"].get(operator, 0) for operator in ATTENTION)
    total = counter.get_total_flops()
    return Cost(total // 2, (total - attention) // 2)

"""The attention operators in plain PyTorch operations, for exporters without custom operators.

`ExportedProgram.run_decompositions(table())` replaces the operators in a captured graph by their dense forms.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ppma.ops import dense, torch_ops
from ppma.ops.layout import heads_last


def _polyline_attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    (q, k, v, log_alpha, log_beta), options, _, valid = torch_ops.split_arguments(arguments)
    out, stats, first = dense.polyline_attention(q, k, v, log_alpha, log_beta, options, valid)
    return heads_last(out), stats, first


def _criss_cross_attention(*arguments: Any) -> Tensor:
    (q, k, v, log_alpha, log_beta), options, _, valid = torch_ops.split_arguments(arguments)
    return heads_last(dense.criss_cross_attention(q, k, v, log_alpha, log_beta, options, valid))


def _linear_attention(*arguments: Any) -> Tensor:
    *tensors_and_paths, _backend = arguments
    return heads_last(dense.linear_attention(*tensors_and_paths))


def table() -> dict[Any, Callable[..., Any]]:
    """The operators of a model's forward pass, each with its dense form."""
    return {
        torch.ops.ppma.polyline_attention.default: _polyline_attention,
        torch.ops.ppma.criss_cross_attention.default: _criss_cross_attention,
        torch.ops.ppma.linear_attention.default: _linear_attention,
    }

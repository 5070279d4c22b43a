"""What the attention operators are made of, for exporters that know no custom operators.

`ExportedProgram.run_decompositions(table())` replaces the operators in a captured graph by their dense forms.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ppma.ops import dense, library  # noqa: F401  (library defines torch.ops.ppma)
from ppma.ops.layout import heads_last


def _attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *inputs, _backend = arguments
    out, stats, first = dense.attention(*inputs)
    return heads_last(out), stats, first


def _criss_cross(*arguments: Any) -> Tensor:
    *inputs, _backend = arguments
    return heads_last(dense.criss_cross(*inputs))


def table() -> dict[Any, Callable[..., Any]]:
    """Operators that a model's forward pass may contain, and what they are made of."""
    return {
        torch.ops.ppma.attention.default: _attention,
        torch.ops.ppma.criss_cross.default: _criss_cross,
    }

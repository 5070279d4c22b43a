"""What is fused around the attention of a block, against float64: rotary embeddings, decay heads, convolutions."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ppma.ops.decay_head import decay_head
from ppma.ops.depthwise import depthwise_conv
from ppma.ops.rotary import rotary_split
from ppma.testing import assert_accurate

HEADS, D = 2, 16


def _rotary(packed: Tensor, *, cos: Tensor, sin: Tensor, backend: Any) -> Tensor:
    return torch.cat(rotary_split(packed, HEADS, cos, sin, backend=backend), -1)


def _decays(*tensors: Tensor, softplus: bool, backend: Any) -> Tensor:
    return torch.cat(decay_head(*tensors, softplus=softplus, backend=backend))


def _cases(
    height: int, width: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Callable[..., Tensor], list[Tensor]]]:
    """Functions with their tensors; they take the backend by name."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    tokens, dim = height * width, HEADS * D
    angles = random(tokens, D // 2).float()
    yield partial(_rotary, cos=angles.cos(), sin=angles.sin()), [random(2, tokens, 3 * dim)]
    yield partial(_decays, softplus=False), [random(2, tokens, dim), random(2, D), random(HEADS, 2)]
    yield (
        partial(_decays, softplus=True),
        [random(2, tokens, dim), random(2, D), random(HEADS, 2), random(HEADS, 2)],
    )
    x = random(2, height, width, dim)
    yield partial(depthwise_conv, gelu=True), [x, random(dim, 1, 3, 3), random(dim)]
    yield depthwise_conv, [x, random(dim, 1, 5, 5), random(dim), random(*x.shape)]


def run(device: torch.device, backend: str, grids: tuple[tuple[int, int], ...]) -> str:
    """Compare outputs and gradients on every grid, in float32 and bfloat16."""
    count = 0
    for grid in grids:
        for dtype in (torch.float32, torch.bfloat16):
            for function, tensors in _cases(*grid, dtype, device):
                fast, exact = (partial(function, backend=name) for name in (backend, "torch"))
                # Gradients of parameters sum all tokens.
                assert_accurate(fast, exact, tensors, 2 * HEADS * grid[0] * grid[1] + 64)
                count += 1
    return f"{count} cases"

"""Attention at high resolution: peak memory of the operator and the dense form, and time of each kind by grid size.

An image of 800 x 1333 is padded to 800 x 1344, so the third stage of PPMA-T, the first with full attention, has a
grid of 50 x 84 = 4,200 tokens. `python -m ppma.bench.high_resolution` prints the tables of the documentation.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import ppma
from ppma.layers.attention import ATTENTION_KINDS, PolylineAttention
from ppma.measure import memory
from ppma.measure.timing import interleave

GRID, HEADS, HEAD_DIM = (50, 84), 8, 32
FORMS = ("operator", "dense")
MEGABYTE = 2**20


def attention_call(form: str, training: bool, heads: int, grid: Sequence[int]) -> Callable[[], Any]:
    """A function that runs the third stage's attention for one image.

    Args:
        form: "operator" for `ppma.polyline_attention`, "dense" for the equation with N x N matrices.
        training: also compute the gradients of all inputs.
        heads: number of heads.
        grid: (H, W).
    """
    torch.manual_seed(0)
    shape = (1, heads, *grid)
    inputs = [torch.randn(*shape, HEAD_DIM) for _ in range(3)] + [-torch.rand(shape) for _ in range(2)]
    compute = {"operator": ppma.polyline_attention, "dense": _dense_attention}[form]

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return compute(*inputs)

    def forward_and_backward() -> tuple[torch.Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        return torch.autograd.grad(compute(*leaves).sum(), leaves)

    return forward_and_backward if training else forward


def _dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_alpha: torch.Tensor, log_beta: torch.Tensor
) -> torch.Tensor:
    """(softmax(q k^T) * L2D) v with mask and attention map as N x N matrices."""
    queries, keys, values = (x.flatten(2, 3) for x in (q, k, v))
    weights = (queries @ keys.mT * HEAD_DIM**-0.5).softmax(-1) * ppma.polyline_mask(log_alpha, log_beta)
    return (weights @ values).unflatten(2, q.shape[2:4])


def peak(form: str, *, training: bool, heads: int = HEADS, grid: tuple[int, int] = GRID) -> int:
    """Peak memory of one call in bytes."""
    return memory.peak("ppma.bench.high_resolution:attention_call", form, training, heads, grid, warm=False)


def table() -> str:
    """A Markdown table of both forms, forward and forward + backward."""
    tokens = GRID[0] * GRID[1]
    one = HEADS * tokens**2 * 4 / MEGABYTE
    lines = [
        f"{tokens} tokens, {HEADS} heads; one float32 N x N matrix per head takes {one:.0f} MB",
        "| form | forward | forward and backward |",
        "| --- | ---: | ---: |",
    ]
    for form in FORMS:
        cells = [f"{peak(form, training=training) / MEGABYTE:.0f} MB" for training in (False, True)]
        lines.append(f"| {form} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def kinds_table(sides: Sequence[int] = (32, 64, 128), rounds: int = 5) -> str:
    """Milliseconds of a forward pass of `PolylineAttention` (64 channels, 4 heads, one image) by kind and grid side."""
    lines = [
        "| kind | " + " | ".join(f"{side} x {side}" for side in sides) + " |",
        "| --- |" + " ---: |" * len(sides),
    ]
    torch.manual_seed(0)
    layers = {kind: PolylineAttention(64, 4, kind=kind).eval() for kind in ATTENTION_KINDS}
    medians: dict[str, list[float]] = {kind: [] for kind in layers}
    for side in sides:
        x = torch.randn(1, side, side, 64)
        with torch.inference_mode():
            timings = interleave({kind: partial(layer, x) for kind, layer in layers.items()}, rounds=rounds)
        for kind, column in medians.items():
            column.append(1e3 * timings.median(kind))
    lines += [f"| {kind} | " + " | ".join(f"{ms:.1f}" for ms in column) + " |" for kind, column in medians.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(), kinds_table(), sep="\n\n")

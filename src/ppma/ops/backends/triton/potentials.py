"""Potentials: running sums of log-decays along grid lines, and the way back from their gradients to log-decays.

Logarithms are natural where the mask is added to scores, else to base 2. A potential is kept as the sum of two float32
numbers. One alone is not enough: the mask needs differences of nearby potentials, however long the line and however
strong the decays before. An edge counts at least CUT, which is a decay of 0 in every floating-point type, so sums stay
finite; a log mask that is added to scores counts as minus infinity across such an edge (`with_cuts`).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppma.ops.backends.triton.launch import Config, launch
from ppma.ops.backends.triton.tiles import CUT, LOG2_E, Field, field, head_of, load_plane, pack_potential, store_plane

# The part of a line that is summed at once, and the lines of a program.
LONGEST_CHUNK = 64
LINES = 16


@triton.jit
def line_tile(heads, lines, LINES: tl.constexpr):
    """Image, head and lines of a program."""
    blocks = tl.cdiv(lines, LINES)
    batch, head = head_of(tl.program_id(0) // blocks, heads)
    return batch, head, tl.program_id(0) % blocks * LINES + tl.arange(0, LINES)


@triton.jit
def line_potentials(
    log_decay, potential, heads, lines, n, NATURAL: tl.constexpr, LINES: tl.constexpr, CHUNK: tl.constexpr
):
    """Sum the log-decays of LINES lines of one head. The edge before the first token is never read."""
    batch, head, line = line_tile(heads, lines, LINES)
    before = tl.zeros((LINES,), tl.float64)
    for start in range(0, n, CHUNK):
        position = start + tl.arange(0, CHUNK)
        inside = (line < lines)[:, None] & (position < n)[None, :]
        edge = inside & (position > 0)[None, :]
        edges = load_plane(log_decay, 0, batch, head, line[:, None], position[None, :], edge)
        edges = edges.to(tl.float64)
        if not NATURAL:
            edges *= LOG2_E
        edges = tl.where(edges < CUT, CUT, edges)  # not `maximum`, which would drop NaN
        total = tl.cumsum(edges, 1) + before[:, None]
        before += tl.sum(edges, 1)
        high = total.to(tl.float32)
        word = pack_potential(high, (total - high.to(tl.float64)).to(tl.float32))
        store_plane(potential, 0, batch, head, line[:, None], position[None, :], inside, word)


@triton.jit
def log_decay_gradient(parts, gradient, heads, lines, n, slots, LINES: tl.constexpr, CHUNK: tl.constexpr):
    """The log-decay of an edge moves the potentials of all tokens behind it: sum the slots, then sum from the end."""
    batch, head, line = line_tile(heads, lines, LINES)
    behind = tl.zeros((LINES,), tl.float64)
    chunks = tl.cdiv(n, CHUNK)
    for back in range(chunks):
        position = (chunks - 1 - back) * CHUNK + tl.arange(0, CHUNK)
        inside = (line < lines)[:, None] & (position < n)[None, :]
        moved = tl.zeros((LINES, CHUNK), tl.float64)
        for slot in range(slots):
            moved += load_plane(parts, slot, batch, head, line[:, None], position[None, :], inside).to(tl.float64)
        total = tl.cumsum(moved, 1, reverse=True) + behind[:, None]
        behind += tl.sum(moved, 1)
        total = tl.where((position > 0)[None, :], total, 0.0)
        store_plane(gradient, 0, batch, head, line[:, None], position[None, :], inside, total)


def potentials(log_decay: Tensor, axis: int, mode: str) -> Tensor:
    """Potentials along one axis of the grid.

    Args:
        log_decay: (B, heads, H, W), any strides.
        axis: 2 for lines along H, 3 for lines along W.
        mode: of the kernel that reads them; "logit" adds logarithms to natural scores, the others want decays.

    Returns:
        (1, B, heads, H, W) int64: two float32 numbers each; see `pack_potential`.
    """
    out = torch.empty((1, *log_decay.shape), dtype=torch.int64, device=log_decay.device)
    lines = _lines(log_decay[None], axis)
    _launch(line_potentials, lines, log_decay=field(lines), potential=field(_lines(out, axis)), NATURAL=mode == "logit")
    return out


class Slots:
    """Room for what potentials receive, (slots, B, heads, H, W): programs write to places of their own, no atomics."""

    def __init__(self, slots: int, like: Tensor) -> None:
        self.buffer = torch.empty((slots, *like.shape), dtype=torch.float32, device=like.device)
        self._taken = 0

    def take(self, slots: int) -> Field:
        start, self._taken = self._taken, self._taken + slots
        return field(self.buffer[start : self._taken])


def gradient(parts: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    """Gradient of the log-decays from what the potentials received.

    Args:
        parts: (slots, B, heads, H, W) float32, contiguous; the slots are summed.
        axis: 2 for lines along H, 3 for lines along W.
        dtype: of the result.

    Returns:
        (B, heads, H, W) contiguous, zero for the edges outside the grid.
    """
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    lines = _lines(out[None], axis)
    parts = _lines(parts, axis)
    _launch(log_decay_gradient, lines, parts=field(parts), gradient=field(lines), slots=parts.shape[0])
    return out


def _launch(kernel: Any, tensor: Tensor, **arguments: Any) -> None:
    _, batch, heads, lines, n = tensor.shape
    launch(
        kernel,
        (triton.cdiv(lines, LINES) * batch * heads,),
        [Config(warps=4)],
        heads=heads,
        lines=lines,
        n=n,
        LINES=LINES,
        CHUNK=min(LONGEST_CHUNK, triton.next_power_of_2(n)),
        **arguments,
    )


def _lines(tensor: Tensor, axis: int) -> Tensor:
    """(planes, B, heads, lines, n)."""
    return tensor if axis == 3 else tensor.transpose(3, 4)

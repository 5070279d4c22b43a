"""Potentials: running sums of log-decays along grid lines, and the way back from their gradients to log-decays.

Logarithms are natural where the mask is added to scores, else to base 2. A potential is kept as the sum of two float32
numbers. One alone is not enough: the mask needs differences of nearby potentials, however long the line and however
strong the decays before. An edge counts at least CUT, which is a decay of 0 in every floating-point type, so sums stay
finite; a log mask that is added to scores counts as minus infinity across such an edge (`with_cuts`).

A launch does both axes: its first programs the rows, the others the columns, which are rows of fields with swapped
axes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppma.ops.backends.triton.launch import Config, cdiv, launch, next_power_of_2
from ppma.ops.backends.triton.tiles import (
    CUT,
    LOG2_E,
    Field,
    decay_between,
    head_of,
    kernel,
    load_plane,
    pack_pair,
    plane,
    store_plane,
)

# The part of a line that is summed at once, and the lines of a program.
LONGEST_CHUNK = 64
LINES = 16
CONFIGS = [Config(warps=4)]
# The longest line of a table, and the entries that a program makes at once.
LONGEST_TABLE = 64
TABLE_ENTRIES = 4096


@triton.jit
def line_tile(heads, H, W, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Image and head of a program, and the number of its first row or, beyond the rows, of H + its first column."""
    row_tiles = tl.cdiv(H, ROWS)
    tiles = row_tiles + tl.cdiv(W, COLUMNS)
    batch, head = head_of(tl.program_id(0) // tiles, heads)
    tile = tl.program_id(0) % tiles
    return batch, head, tl.where(tile < row_tiles, tile * ROWS, H + (tile - row_tiles) * COLUMNS)


@triton.jit
def load_edges(log_decay, batch, head, line, lines, position, n, NATURAL: tl.constexpr):
    """Log-decays of the edges before some positions, (lines, positions). That before the first is never read."""
    edge = (line < lines)[:, None] & ((position > 0) & (position < n))[None, :]
    edges = load_plane(log_decay, 0, batch, head, line[:, None], position[None, :], edge).to(tl.float64)
    if not NATURAL:
        edges *= LOG2_E
    return tl.where(edges < CUT, CUT, edges)  # not `maximum`, which would drop NaN


@triton.jit
def two_parts(total):
    """A float64 number as the sum of two float32 numbers."""
    high = total.to(tl.float32)
    return high, (total - high.to(tl.float64)).to(tl.float32)


@triton.jit
def sum_lines(log_decay, potential, batch, head, line, lines, n, NATURAL: tl.constexpr, CHUNK: tl.constexpr):
    before = tl.zeros(line.shape, tl.float64)
    for start in range(0, n, CHUNK):
        position = start + tl.arange(0, CHUNK)
        edges = load_edges(log_decay, batch, head, line, lines, position, n, NATURAL)
        high, low = two_parts(tl.cumsum(edges, 1) + before[:, None])
        before += tl.sum(edges, 1)
        inside = (line < lines)[:, None] & (position < n)[None, :]
        word = pack_pair(high, low)
        store_plane(potential, 0, batch, head, line[:, None], position[None, :], inside, word)


@kernel
def line_potentials(
    log_alpha,
    log_beta,
    row_potentials,
    column_potentials,
    heads,
    H,
    W,
    NATURAL: tl.constexpr,
    LINES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Potentials of LINES rows or columns of one head."""
    batch, head, first = line_tile(heads, H, W, LINES, LINES)
    if first < H:
        sum_lines(log_alpha, row_potentials, batch, head, first + tl.arange(0, LINES), H, W, NATURAL, CHUNK)
    else:
        sum_lines(log_beta, column_potentials, batch, head, first - H + tl.arange(0, LINES), W, H, NATURAL, CHUNK)


@triton.jit
def line_decays(log_decay, batch, head, line, lines, n, LOG: tl.constexpr, BLOCK_N: tl.constexpr):
    """The decay matrices of some lines, (lines, BLOCK_N, BLOCK_N)."""
    position = tl.arange(0, BLOCK_N)
    high, low = two_parts(tl.cumsum(load_edges(log_decay, batch, head, line, lines, position, n, LOG), 1))
    return decay_between(high[:, :, None], low[:, :, None], high[:, None, :], low[:, None, :], LOG)


@triton.jit
def row_matrices(log_alpha, table, batch, head, i, H, W, wide, LOG: tl.constexpr, BLOCK: tl.constexpr):
    decays = line_decays(log_alpha, batch, head, i, H, W, LOG, BLOCK)
    i, j, l = i[:, None, None], tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    decays = tl.where((j < W) & (l < W), decays, -1e30 if LOG else 0.0)
    tl.store(table + ((i * wide + j) * wide + l), decays, mask=((i < H) & (j < wide)) & (l < wide))


@triton.jit
def column_matrices(log_beta, table, batch, head, l, H, W, wide, LOG: tl.constexpr, BLOCK: tl.constexpr):
    decays = line_decays(log_beta, batch, head, l, W, H, LOG, BLOCK)
    l, i, k = l[:, None, None], tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    tl.store(table + ((i * H + k) * wide + l), decays, mask=((i < H) & (k < H)) & (l < wide))


@triton.jit
def tables_of(row_table, column_table, octets, H, index):
    """Where the tables of a head start. Their padded width is `octets` times 8, so that the compiler knows a factor."""
    wide = octets * 8
    return row_table + index * H * wide * wide, column_table + index * H * H * wide


@kernel
def mask_tables(
    log_alpha, log_beta, row_table, column_table, heads, H, W, octets, LOG: tl.constexpr,
    ROW_LINES: tl.constexpr, COLUMN_LINES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Decay matrices of some rows, row_table[i, j, l], or of some columns, column_table[i, k, l].

    Padded columns have a decay of 0 in the rows; in the columns they have a decay.
    """
    wide = octets * 8
    batch, head, first = line_tile(heads, H, wide, ROW_LINES, COLUMN_LINES)
    row_table, column_table = tables_of(row_table, column_table, octets, H, batch * heads + head)
    if first < H:
        i = first + tl.arange(0, ROW_LINES)
        row_matrices(log_alpha, row_table, batch, head, i, H, W, wide, LOG, BLOCK_W)
    else:
        l = first - H + tl.arange(0, COLUMN_LINES)
        column_matrices(log_beta, column_table, batch, head, l, H, W, wide, LOG, BLOCK_H)


@triton.jit
def sum_back(parts, gradient, batch, head, line, lines, n, slots, share, CHUNK: tl.constexpr):
    """The log-decay of an edge moves the potentials of all tokens behind it: sum the slots, then sum from the end."""
    behind = tl.zeros(line.shape, tl.float64)
    chunks = tl.cdiv(n, CHUNK)
    for back in range(chunks):
        position = (chunks - 1 - back) * CHUNK + tl.arange(0, CHUNK)
        inside = (line < lines)[:, None] & (position < n)[None, :]
        moved = tl.zeros((line.shape[0], CHUNK), tl.float64)
        for slot in range(slots):
            moved += load_plane(parts, slot, batch, head, line[:, None], position[None, :], inside).to(tl.float64)
        total = tl.cumsum(moved, 1, reverse=True) + behind[:, None]
        behind += tl.sum(moved, 1)
        total = tl.where((position > 0)[None, :], total * share, 0.0)
        store_plane(gradient, 0, batch, head, line[:, None], position[None, :], inside, total)


@kernel
def log_decay_gradients(
    alpha_parts, beta_parts, grad_alpha, grad_beta, heads, H, W, slots, share, LINES: tl.constexpr, CHUNK: tl.constexpr
):
    """Gradients of the log-decays of LINES rows or columns of one head."""
    batch, head, first = line_tile(heads, H, W, LINES, LINES)
    if first < H:
        sum_back(alpha_parts, grad_alpha, batch, head, first + tl.arange(0, LINES), H, W, slots, share, CHUNK)
    else:
        sum_back(beta_parts, grad_beta, batch, head, first - H + tl.arange(0, LINES), W, H, slots, share, CHUNK)


def potentials(log_alpha: Tensor, log_beta: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Potentials along the rows and along the columns.

    Args:
        log_alpha: (B, heads, H, W), any strides.
        log_beta: (B, heads, H, W), any strides.
        mode: of the kernel that reads them; "logit" adds logarithms to natural scores, the others multiply by decays.

    Returns:
        Two (1, B, heads, H, W) int64 tensors: two float32 numbers each; see `pack_pair`.
    """
    alpha, beta = torch.empty((2, 1, *log_alpha.shape), dtype=torch.int64, device=log_alpha.device).unbind(0)
    _launch(
        line_potentials,
        log_alpha,
        log_alpha=plane(log_alpha[None]),
        log_beta=_swapped(log_beta[None]),
        row_potentials=plane(alpha),
        column_potentials=_swapped(beta),
        NATURAL=mode == "logit",
    )
    return alpha, beta


def tables(log_alpha: Tensor, log_beta: Tensor, mode: str, cols: int) -> tuple[Tensor, Tensor] | None:
    """The decay matrices of all rows and of all columns, or None where lines are too long for tables.

    Args:
        log_alpha: (B, heads, H, W), any strides.
        log_beta: (B, heads, H, W), any strides.
        mode: of the kernel that reads them.
        cols: columns of its tiles; the last axis of the tables is padded to a multiple.

    Returns:
        rows[..., i, j, l], (B, heads, H, padded W, padded W), with no decay in the padding, and columns[..., i, k, l],
        (B, heads, H, H, padded W); float32.
    """
    batch, heads, height, width = log_alpha.shape
    if max(height, width) > LONGEST_TABLE:
        return None
    wide = cdiv(width, cols) * cols
    device = log_alpha.device
    rows = torch.empty((batch, heads, height, wide, wide), dtype=torch.float32, device=device)
    columns = torch.empty((batch, heads, height, height, wide), dtype=torch.float32, device=device)
    block_h, block_w = max(2, next_power_of_2(height)), next_power_of_2(wide)
    row_lines, column_lines = (max(1, min(16, TABLE_ENTRIES // block**2)) for block in (block_w, block_h))
    launch(
        mask_tables,
        (batch * heads * (cdiv(height, row_lines) + cdiv(wide, column_lines)),),
        CONFIGS,
        log_alpha=plane(log_alpha[None]),
        log_beta=_swapped(log_beta[None]),
        row_table=rows,
        column_table=columns,
        heads=heads,
        H=height,
        W=width,
        octets=wide // 8,
        LOG=mode == "logit",
        ROW_LINES=row_lines,
        COLUMN_LINES=column_lines,
        BLOCK_H=block_h,
        BLOCK_W=block_w,
    )
    return rows, columns


class Slots:
    """Room for what potentials receive, (slots, B, heads, H, W): programs write to places of their own, no atomics."""

    def __init__(self, slots: int, like: Tensor) -> None:
        self.buffer = torch.empty((slots, *like.shape), dtype=torch.float32, device=like.device)
        self._taken = 0

    def take(self, slots: int) -> Field:
        start, self._taken = self._taken, self._taken + slots
        return plane(self.buffer[start : self._taken])


def gradients(alpha_parts: Tensor, beta_parts: Tensor, dtype: torch.dtype, share: float = 1.0) -> tuple[Tensor, Tensor]:
    """Gradients of the log-decays from what the potentials received.

    Args:
        alpha_parts: (slots, B, heads, H, W) float32, contiguous; the slots are summed.
        beta_parts: the same.
        dtype: of the results.
        share: factor on them.

    Returns:
        Two (B, heads, H, W) contiguous, zero for the edges outside the grid.
    """
    # Not parts of one tensor: an operator must not return views of its own making.
    grad_alpha, grad_beta = (torch.empty(alpha_parts.shape[1:], dtype=dtype, device=alpha_parts.device) for _ in "ab")
    _launch(
        log_decay_gradients,
        grad_alpha,
        alpha_parts=plane(alpha_parts),
        beta_parts=_swapped(beta_parts),
        grad_alpha=plane(grad_alpha[None]),
        grad_beta=_swapped(grad_beta[None]),
        slots=alpha_parts.shape[0],
        share=share,
    )
    return grad_alpha, grad_beta


def _launch(kernel: Any, like: Tensor, **arguments: Any) -> None:
    batch, heads, height, width = like.shape
    launch(
        kernel,
        (batch * heads * (cdiv(height, LINES) + cdiv(width, LINES)),),
        CONFIGS,
        heads=heads,
        H=height,
        W=width,
        LINES=LINES,
        CHUNK=min(LONGEST_CHUNK, max(2, next_power_of_2(max(height, width)))),
        **arguments,
    )


def _swapped(tensor: Tensor) -> Field:
    """(planes, B, heads, H, W) as (planes, B, heads, W, H)."""
    return plane(tensor.transpose(3, 4))

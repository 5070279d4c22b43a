"""Tile shapes and launch configurations: a small table, found by compiling for every target (no spilled registers).

The first configuration is the default; the others are what `PPMA_TRITON_AUTOTUNE=1` measures it against. The functions
are cached, because a model asks for the same tiles at every launch.
"""

from functools import cache
from typing import NamedTuple

import torch

from ppma.ops.backends.triton.launch import Config, cdiv, next_power_of_2

# Tokens of a line that a program keeps fixed: four warps of sixteen rows of a matrix instruction.
BLOCK_M = 64


@cache
def line_tokens(n: int, dtype: torch.dtype, channels: int) -> int:
    """Tokens of a line that a program keeps fixed: fewer where they would not fit the registers."""
    most = BLOCK_M // 2 if channels > (16 if dtype == torch.float32 else 64) else BLOCK_M
    return min(most, max(16, next_power_of_2(n)))


@cache
def line_configs(kind: str, dtype: torch.dtype, n: int, channels: int) -> list[Config]:
    """How to launch an attention kernel on lines.

    Args:
        kind: "forward", or "queries", "keys", "transposed" of the backward.
        dtype: of the values.
        n: tokens of a line.
        channels: of a head, padded.
    """
    tokens = line_tokens(n, dtype, channels)
    single = dtype == torch.float32
    # Products of float32 run outside the matrix units and take twice the registers: twice the threads, or more where
    # three products are summed. Twice for gradients of wide heads in half precision, too.
    crowded = kind == "keys" and channels > (16 if tokens < BLOCK_M else 32)
    wide_gradients = kind in ("queries", "keys") and channels > 64
    warps = tokens // 16 * ((4 if crowded else 2) if single else 2 if wide_gradients else 1)
    wide = kind == "forward" and not single and channels <= 32 and tokens > 16
    pipelined = kind == "forward" and not single
    waves = _waves(warps)
    default = Config(warps, 2 if pipelined else 1, {"BLOCK_N": 32 if wide else 16}, waves)
    others = [Config(warps, stages, {"BLOCK_N": size}, waves) for size in (16, 32) for stages in (1, 2)]
    return [default, *(config for config in others if config != default)]


def _waves(warps: int) -> int:
    """Sixteen rows for each half of a wave of 64 threads: with more waves they would repeat one another's products."""
    return max(1, warps // 2)


class Tile(NamedTuple):
    """The tokens that a program keeps fixed.

    Attributes:
        rows: grid rows.
        cols: columns of each, as many as of the tiles of other tokens.
    """

    rows: int
    cols: int


@cache
def attention_tile(height: int, width: int, band: int | None, dtype: torch.dtype, channels: int) -> Tile:
    """The tile of tokens that a program keeps fixed: the one with the least padding, and then the widest.

    Args:
        height: grid rows.
        width: grid columns.
        band: grid rows that see each other, which a tile must not cross; None for all.
        dtype: of the values.
        channels: of a head, padded.
    """
    # Two warps of sixteen rows of a matrix instruction; four where a row of channels is wider than a tile of scores;
    # sixteen rows for two warps where more would not fit the registers.
    tokens = 16 if channels > 64 else 64 if channels == 64 and dtype != torch.float32 else 32
    shapes = [Tile(size // cols, cols) for size in (tokens, 16) for cols in (16, 8)]
    fitting = [shape for shape in shapes if band is None or band % shape.rows == 0]
    return min(fitting, key=lambda shape: _padded_area(height, width, *shape))


def _padded_area(height: int, width: int, rows: int, cols: int) -> int:
    return cdiv(height, rows) * rows * cdiv(width, cols) * cols


@cache
def attention_configs(kind: str, dtype: torch.dtype, tile: Tile, channels: int) -> list[Config]:
    """How to launch an attention kernel on a grid: warps, and rows of a tile of other tokens.

    Args:
        kind: "forward", or "queries", "keys" of the backward.
        dtype: of the values.
        tile: of fixed tokens.
        channels: of a head, padded.
    """
    warps = tile.rows * tile.cols // 16
    if dtype == torch.float32:  # products run outside the matrix units and take more registers
        warps *= 2 if channels <= 32 else 4 if channels <= 64 else 8
    elif channels > 64 or (kind == "keys" and channels == 64 and tile == Tile(8, 8)):  # else sm_89 spills
        warps *= 2
    most = 32 if kind == "forward" and channels <= 32 and dtype != torch.float32 else 16
    return [Config(warps, 1, {"OTHER_ROWS": max(1, size // tile.cols)}, _waves(warps)) for size in (most, 48 - most)]


@cache
def state_configs(reads: bool, dtype: torch.dtype, channels: int) -> list[Config]:
    """Only one: reading states adds to its output, so it cannot be repeated to be measured."""
    if channels <= 16 or (channels <= 32 and dtype != torch.float32):
        return [Config(4, 1)]
    return [Config(16 if reads and channels > 32 and dtype == torch.float32 else 8, 1)]

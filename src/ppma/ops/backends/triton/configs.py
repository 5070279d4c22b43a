"""Tile shapes and launch configurations: a small table, found by compiling for every target (no spilled registers)."""

import torch
import triton

from ppma.ops.backends.triton.launch import Config


def line_tokens(n: int) -> int:
    """Tokens of a line that a program keeps fixed."""
    return min(64, max(16, triton.next_power_of_2(n)))


def line_configs(kind: str, dtype: torch.dtype, n: int, width: int) -> list[Config]:
    tokens = line_tokens(n)
    warps = tokens // 16
    return [Config(warps, 1, {"OTHERS": 16})]


def attention_tile(height: int, width: int, band: int | None = None) -> tuple[int, int]:
    """Rows and columns of the tile of tokens that a program keeps fixed: the one with the least padding.

    One row is worth a little padding, because then half of the mask comes from vectors.

    Args:
        height: grid rows.
        width: grid columns.
        band: grid rows that see each other, which a tile must not cross; None for all.
    """
    shapes = [(64 // cols, cols) for cols in (64, 32, 16, 8)]
    fitting = [(rows, cols) for rows, cols in shapes if band is None or band % rows == 0]
    return min(fitting, key=lambda shape: _padded_area(height, width, *shape) * (1.0 if shape[0] == 1 else 1.2))


def _padded_area(height: int, width: int, rows: int, cols: int) -> int:
    return triton.cdiv(height, rows) * rows * triton.cdiv(width, cols) * cols


def attention_configs(
    kind: str, mode: str, dtype: torch.dtype, tile: tuple[int, int], width: int, channels: int
) -> list[Config]:
    return [Config(4, 1, {"OTHERS": 16})]


def state_configs(dtype: torch.dtype, channels: int) -> list[Config]:
    """Only one: reading states adds to its output, so it cannot be repeated to be measured."""
    return [Config(4, 1)]

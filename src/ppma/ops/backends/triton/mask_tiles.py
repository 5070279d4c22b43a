"""The mask between a tile of fixed tokens and a tile of others, for attention on a grid.

A program keeps a tile of tokens fixed, ROWS grid rows of COLS columns, and walks over the other tokens in tiles of
OTHER_ROWS by OTHER_COLS. Between a fixed token (i, j) and another (k, l) there are two paths:

    near: along row i, then along column l      far: along column j, then along row k

With A_i[j, l] the decay within row i and g[i, k, l] the decay within column l, the masks are `A_i[j, l] * g[i, k, l]`
and `g[i, k, j] * A_k[j, l]`. A and g come from tables, or where those would be too large from potentials (both of
`potentials.py`); A_i does not change while k does. They are loaded as (ROWS, COLS, OTHER_ROWS, OTHER_COLS), with 1 for
an axis on which they do not depend, and `spread` to the tile (BLOCK_M, BLOCK_N) of scores.
"""

import triton
import triton.language as tl

from ppma.ops.backends.triton.tiles import decay_between, head_of, load_pair


@triton.jit
def grid_tile(heads, H, W, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Image and head; first row of the tile, first column, its number across; row and column of each token."""
    across = tl.cdiv(W, COLS)
    tiles = tl.cdiv(H, ROWS) * across
    batch, head = head_of(tl.program_id(0) // tiles, heads)
    tile = tl.program_id(0) % tiles
    top, left = tile // across * ROWS, tile % across * COLS
    m = tl.arange(0, ROWS * COLS)
    return batch, head, top, left, tile % across, top + m // COLS, left + m % COLS


@triton.jit
def row_decay(alpha, octets, batch, head, row, col, other_col, LOG: tl.constexpr, TABLES: tl.constexpr):
    """A: the decay between two columns of a row. Indices lie within the grid and broadcast."""
    if TABLES:  # alpha is the first row of the head's table
        return tl.load(alpha + ((row * octets * 8 + col) * octets * 8 + other_col))
    else:
        high, low = load_pair(alpha, 0, batch, head, row, col, None)
        other_high, other_low = load_pair(alpha, 0, batch, head, row, other_col, None)
        return decay_between(high, low, other_high, other_low, LOG)


@triton.jit
def column_decay(beta, octets, H, batch, head, row, other_row, col, stop, LOG: tl.constexpr, TABLES: tl.constexpr):
    """g: the decay between two rows of a column. Indices broadcast and, of `row` and `col`, lie within the grid.

    Rows from `stop` on have no decay in a log mask from tables; else they have that of the row before.
    """
    other = tl.minimum(other_row, stop - 1)
    if TABLES:  # beta is the first row of the head's table
        there = beta + ((row * H + other) * octets * 8 + col)
        if LOG:
            exists = tl.zeros_like(row) + other_row < stop
            return tl.load(there, mask=tl.broadcast_to(exists, there.shape), other=-1e30)
        else:
            return tl.load(there)
    else:
        high, low = load_pair(beta, 0, batch, head, row, col, None)
        other_high, other_low = load_pair(beta, 0, batch, head, other, col, None)
        return decay_between(high, low, other_high, other_low, LOG)


@triton.jit
def spread(x, ROWS: tl.constexpr, COLS: tl.constexpr, OTHER_ROWS: tl.constexpr, OTHER_COLS: tl.constexpr):
    """Decays that broadcast to (ROWS, COLS, OTHER_ROWS, OTHER_COLS), as a tile of scores."""
    x = tl.broadcast_to(x, (ROWS, COLS, OTHER_ROWS, OTHER_COLS))
    return tl.reshape(x, (ROWS * COLS, OTHER_ROWS * OTHER_COLS))

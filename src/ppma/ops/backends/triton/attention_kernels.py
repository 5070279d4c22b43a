"""Flash attention with the polyline path mask, tiled by grid rows (`mask_tiles.py`): the forward pass.

For fixed queries the near path is V2H and the far path is H2V. MODE says what the mask does: "hadamard" multiplies the
softmax, "logit" adds its logarithm to the scores (one softmax for each path, averaged), "linear" multiplies the scores
themselves. Without paths there is no mask. Tokens see those of the same `band` of grid rows; for a softmax the band is
the grid.
"""

import triton.language as tl

from ppma.ops.backends.triton.mask_tiles import column_decay, grid_tile, row_decay, spread
from ppma.ops.backends.triton.potentials import tables_of
from ppma.ops.backends.triton.tiles import (
    LOG2_E,
    end_softmax,
    kernel,
    load_plane,
    load_tokens,
    online_softmax,
    product,
    store_plane,
    store_tokens,
    unbounded_product,
)


@kernel
def attention_forward(
    q, k, v, alpha, beta, row_table, column_table, valid, out, first, stats, heads, H, W, octets, band, scale,
    MODE: tl.constexpr, V2H: tl.constexpr, H2V: tl.constexpr, TABLES: tl.constexpr, CHECK: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, OTHER_ROWS: tl.constexpr, OTHER_COLS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output, peak and total of each softmax and, of two softmaxes, the output of the first.

    Logits of "hadamard" are the products of queries and keys themselves: their scale, which is positive, is part of
    `unit`. CHECK says that tiles reach beyond the grid where the mask does not tell. `stats` and `first` may be
    None, and so may `valid`, 0 at keys that take no part.
    """
    BLOCK_M: tl.constexpr = ROWS * COLS
    BLOCK_N: tl.constexpr = OTHER_ROWS * OTHER_COLS
    LOG: tl.constexpr = MODE == "logit"
    TWO: tl.constexpr = LOG and (V2H and H2V)
    PADDED: tl.constexpr = valid is not None
    batch, head, top, left, _, row, col = grid_tile(heads, H, W, ROWS, COLS)
    inside = (row < H) & (col < W)
    queries = load_tokens(q, batch, head, row, col, inside, D, BLOCK_D)
    if TABLES:
        alpha, beta = tables_of(row_table, column_table, octets, H, batch * heads + head)
    i = tl.minimum(top + tl.arange(0, ROWS), H - 1)[:, None, None, None]
    j = (left + tl.arange(0, COLS))[None, :, None, None]
    j = j if TABLES else tl.minimum(j, W - 1)
    unit = LOG2_E if LOG else scale * LOG2_E
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    second_acc, second_peak, second_total = acc, peak, total
    n = tl.arange(0, BLOCK_N)
    start = top // band * band
    stop = tl.minimum(start + band, H)
    for chunk in range(0, W, OTHER_COLS):
        key_col = chunk + n % OTHER_COLS
        c = chunk + tl.arange(0, OTHER_COLS)
        c = (c if TABLES else tl.minimum(c, W - 1))[None, None, None, :]
        if V2H:
            along_row = row_decay(alpha, octets, batch, head, i, j, c, LOG, TABLES)
            along_row = spread(along_row, ROWS, COLS, OTHER_ROWS, OTHER_COLS)
        for r in range(start, stop, OTHER_ROWS):
            key_row = r + n // OTHER_COLS
            key_inside = (key_row < stop) & (key_col < W)
            if PADDED:
                key_inside = load_plane(valid, 0, batch, head, key_row, key_col, key_inside) != 0
            if MODE == "linear" or PADDED:
                key = load_tokens(k, batch, head, key_row, key_col, key_inside, D, BLOCK_D)
                value = load_tokens(v, batch, head, key_row, key_col, key_inside, DV, BLOCK_DV)
            else:  # copies of other keys in place of those outside, whose logits will be minus infinity
                clamped_row, clamped = tl.minimum(key_row, stop - 1), tl.minimum(key_col, W - 1)
                key = load_tokens(k, batch, head, clamped_row, clamped, None, D, BLOCK_D)
                value = load_tokens(v, batch, head, clamped_row, clamped, None, DV, BLOCK_DV)
            other = (r + tl.arange(0, OTHER_ROWS))[None, None, :, None]
            if V2H:
                near = column_decay(beta, octets, H, batch, head, i, other, c, stop, LOG, TABLES)
                near = spread(near, ROWS, COLS, OTHER_ROWS, OTHER_COLS)
            if H2V:
                far = column_decay(beta, octets, H, batch, head, i, other, j, stop, LOG, TABLES)
                far = spread(far, ROWS, COLS, OTHER_ROWS, OTHER_COLS)
                along_other = row_decay(alpha, octets, batch, head, tl.minimum(other, stop - 1), j, c, LOG, TABLES)
                along_other = spread(along_other, ROWS, COLS, OTHER_ROWS, OTHER_COLS)
            # After the decays, so that the compiler keeps to the layout of the product for what follows.
            scores = product(queries, key.T, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), PRECISION)
            if LOG:
                if V2H:
                    logits = tl.fma(scores, scale, along_row) + near
                else:
                    logits = tl.fma(scores, scale, along_other) + far
                if CHECK:
                    logits = tl.where(key_inside[None, :], logits, float("-inf"))
                weights, correction, peak, total = online_softmax(logits, peak, total, unit, PADDED)
                acc = product(weights.to(value.dtype), value, acc * correction[:, None], PRECISION)
                if TWO:
                    logits = tl.fma(scores, scale, along_other) + far
                    if CHECK:
                        logits = tl.where(key_inside[None, :], logits, float("-inf"))
                    weights, correction, second_peak, second_total = online_softmax(
                        logits, second_peak, second_total, unit, PADDED
                    )
                    second_acc = product(weights.to(value.dtype), value, second_acc * correction[:, None], PRECISION)
            else:
                if MODE == "hadamard":
                    if CHECK:
                        scores = tl.where(key_inside[None, :], scores, float("-inf"))
                    scores, correction, peak, total = online_softmax(scores, peak, total, unit, PADDED)
                    acc *= correction[:, None]
                if V2H and H2V:
                    scores *= along_row * near + along_other * far
                elif V2H:
                    scores = scores * along_row * near
                elif H2V:
                    scores = scores * along_other * far
                if MODE == "linear":
                    acc = unbounded_product(scores, value, acc, PRECISION)
                else:
                    acc = product(scores.to(value.dtype), value, acc, PRECISION)

    if MODE != "linear":
        peak, total = end_softmax(peak, total, PADDED)
        acc /= total[:, None]
        if stats is not None:
            store_plane(stats, 0, batch, head, row, col, inside, peak)
            store_plane(stats, 1, batch, head, row, col, inside, total)
    if TWO:
        second_peak, second_total = end_softmax(second_peak, second_total, PADDED)
        second_acc /= second_total[:, None]
        if stats is not None:
            store_plane(stats, 2, batch, head, row, col, inside, second_peak)
            store_plane(stats, 3, batch, head, row, col, inside, second_total)
            store_tokens(first, batch, head, row, col, inside, acc, DV, BLOCK_DV)
        acc = (acc + second_acc) * 0.5
    store_tokens(out, batch, head, row, col, inside, acc, DV, BLOCK_DV)

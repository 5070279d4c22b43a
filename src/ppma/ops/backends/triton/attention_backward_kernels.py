"""Flash attention with the polyline path mask, tiled by grid rows (`mask_tiles.py`): the backward pass.

For fixed queries the near path is V2H and the far path is H2V; for fixed keys it is the other way round, so one kernel
serves both sides. Modes as in `attention_kernels.py`.
"""

import triton
import triton.language as tl

from ppma.ops.backends.triton.mask_tiles import column_decay, grid_tile, row_decay, spread
from ppma.ops.backends.triton.potentials import tables_of
from ppma.ops.backends.triton.tiles import (
    LOG2_E,
    kernel,
    load_pair,
    load_plane,
    load_tokens,
    pack_pair,
    product,
    sign_of,
    store_plane,
    store_tokens,
    unbounded_product,
    unless_certain,
)


@triton.jit
def make_norm(stats, norms, softmax, batch, head, row, col, inside):
    """Peak and log2 of the total of some queries, also stored for the keys' side; weights outside come out as 0."""
    peak = load_plane(stats, 2 * softmax, batch, head, row, col, inside)
    total = tl.log2(load_plane(stats, 2 * softmax + 1, batch, head, row, col, inside, float("inf")))
    store_plane(norms, softmax, batch, head, row, col, inside, pack_pair(peak, total))
    return peak[:, None], total[:, None]


@triton.jit
def softmax_again(logits, peak, total, unit, taking_part, CHECK: tl.constexpr):
    """The weights of a finished softmax; a single weight is exactly 1, because the log2 of its total is 0.

    Peak and total are kept apart: in their combination, the log-sum-exp, large logits would round the total away.
    """
    exponent = tl.fma(logits - peak, unit, -total)
    return tl.exp2(tl.where(taking_part, exponent, float("-inf")) if CHECK else exponent)


@triton.jit
def sum_of_columns(x, ROWS: tl.constexpr, COLS: tl.constexpr, OTHER_ROWS: tl.constexpr, OTHER_COLS: tl.constexpr):
    """Sum a tile over the columns of fixed tokens and the rows of others: (ROWS, OTHER_COLS)."""
    over_columns = tl.sum(tl.reshape(x, (ROWS, COLS, OTHER_ROWS * OTHER_COLS)), 1)
    return tl.sum(tl.reshape(over_columns, (ROWS, OTHER_ROWS, OTHER_COLS)), 1)


@kernel
def attention_backward(
    fixed_a, fixed_b, other_a, other_b, out, first, stats, norms, alpha, beta, row_table, column_table, valid, grad_a, grad_b,
    alpha_own, alpha_corner, beta_own, beta_corner, heads, H, W, octets, band, scale,
    MODE: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr, KEY_SIDE: tl.constexpr, TABLES: tl.constexpr,
    CHECK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, OTHER_ROWS: tl.constexpr, OTHER_COLS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients that belong to a fixed tile of queries (a = q, b = output gradient) or of keys (a = k, b = v).

    The gradient of a near mask goes to the potentials of the fixed token and of the corner of the path, which lies in
    the fixed row: `*_corner` has one slot for each tile across, so that no two programs write the same place. That of
    a far mask goes to the fixed token's column potential; its other ends belong to the other side. The queries' side
    stores pairs in `norms`: peak and log2 of the total of each softmax, and then the deltas of both, the row sums of
    their output times its gradient.
    """
    BLOCK_M: tl.constexpr = ROWS * COLS
    BLOCK_N: tl.constexpr = OTHER_ROWS * OTHER_COLS
    LOG: tl.constexpr = MODE == "logit"
    LINEAR: tl.constexpr = MODE == "linear"
    PADDED: tl.constexpr = valid is not None
    TWO: tl.constexpr = LOG and (NEAR and FAR)
    SOFTMAXES: tl.constexpr = 2 if TWO else 1
    SHARE: tl.constexpr = 1.0 / SOFTMAXES
    # The first softmax is that of V2H, which is far from a key.
    NEAR_SOFTMAX: tl.constexpr = 1 if TWO and KEY_SIDE else 0
    FAR_SOFTMAX: tl.constexpr = 1 if TWO and not KEY_SIDE else 0
    batch, head, top, left, across, row, col = grid_tile(heads, H, W, ROWS, COLS)
    inside = (row < H) & (col < W)
    real = inside
    if PADDED and KEY_SIDE:
        real = load_plane(valid, 0, batch, head, row, col, inside) != 0
    if LINEAR or PADDED:
        a = load_tokens(fixed_a, batch, head, row, col, real, D, BLOCK_D)
        b = load_tokens(fixed_b, batch, head, row, col, real, DV, BLOCK_DV)
    else:  # copies of other tokens in place of those outside: their weights are of use to nobody, but finite
        a = load_tokens(fixed_a, batch, head, tl.minimum(row, H - 1), tl.minimum(col, W - 1), None, D, BLOCK_D)
        b = load_tokens(fixed_b, batch, head, tl.minimum(row, H - 1), tl.minimum(col, W - 1), None, DV, BLOCK_DV)
    if not (LINEAR or KEY_SIDE):
        outputs = load_tokens(out, batch, head, row, col, inside, DV, BLOCK_DV)
        delta = tl.sum(b.to(tl.float32) * outputs.to(tl.float32), 1)
        far_delta = tl.zeros_like(delta)
        if TWO:  # the output is the mean of two
            outputs = load_tokens(first, batch, head, row, col, inside, DV, BLOCK_DV)
            first_delta = tl.sum(b.to(tl.float32) * outputs, 1) * SHARE
            far_delta, delta = delta - first_delta, first_delta
            far_peak, far_total = make_norm(stats, norms, FAR_SOFTMAX, batch, head, row, col, inside)
        near_peak, near_total = make_norm(stats, norms, NEAR_SOFTMAX, batch, head, row, col, inside)
        store_plane(norms, SOFTMAXES, batch, head, row, col, inside, pack_pair(delta, far_delta))
        near_delta, far_delta = delta[:, None], far_delta[:, None]

    if TABLES:
        alpha, beta = tables_of(row_table, column_table, octets, H, batch * heads + head)
    rows = top + tl.arange(0, ROWS)
    i = tl.minimum(rows, H - 1)[:, None, None, None]
    j = (left + tl.arange(0, COLS))[None, :, None, None]
    j = j if TABLES else tl.minimum(j, W - 1)
    unit = LOG2_E if LOG else scale * LOG2_E
    acc_a = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    acc_b = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    own_alpha = tl.zeros((BLOCK_M,), tl.float32)
    far_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    n = tl.arange(0, BLOCK_N)
    start = top // band * band
    stop = tl.minimum(start + band, H)
    for chunk in range(0, W, OTHER_COLS):
        other_col = chunk + n % OTHER_COLS
        c = chunk + tl.arange(0, OTHER_COLS)
        c = (c if TABLES else tl.minimum(c, W - 1))[None, None, None, :]
        if NEAR:
            along_row = row_decay(alpha, octets, batch, head, i, j, c, LOG, TABLES)
            along_row = spread(along_row, ROWS, COLS, OTHER_ROWS, OTHER_COLS)
            row_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            column_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for r in range(start, stop, OTHER_ROWS):
            other_row = r + n // OTHER_COLS
            other_inside = (other_row < stop) & (other_col < W)
            if PADDED and not KEY_SIDE:
                other_inside = load_plane(valid, 0, batch, head, other_row, other_col, other_inside) != 0
            clamped_row, clamped = tl.minimum(other_row, stop - 1), tl.minimum(other_col, W - 1)
            if LINEAR or PADDED:
                oa = load_tokens(other_a, batch, head, other_row, other_col, other_inside, D, BLOCK_D)
                ob = load_tokens(other_b, batch, head, other_row, other_col, other_inside, DV, BLOCK_DV)
            else:
                oa = load_tokens(other_a, batch, head, clamped_row, clamped, None, D, BLOCK_D)
                ob = load_tokens(other_b, batch, head, clamped_row, clamped, None, DV, BLOCK_DV)
            scores = product(a, oa.T, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), PRECISION)
            grads = product(b, ob.T, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), PRECISION)
            if KEY_SIDE and not LINEAR:
                near_peak, near_total = load_pair(norms, NEAR_SOFTMAX, batch, head, clamped_row, clamped, None)
                near_delta, far_delta = load_pair(norms, SOFTMAXES, batch, head, clamped_row, clamped, None)
                if TWO:  # the first softmax is the far one
                    near_delta, far_delta = far_delta[None, :], near_delta[None, :]
                    far_peak, far_total = load_pair(norms, FAR_SOFTMAX, batch, head, clamped_row, clamped, None)
                    far_peak, far_total = far_peak[None, :], far_total[None, :]
                else:
                    near_delta = near_delta[None, :]
                near_peak, near_total = near_peak[None, :], near_total[None, :]
                if not (LOG and TABLES):  # whose mask leaves queries outside no weight
                    near_total = tl.where(other_inside[None, :], near_total, float("inf"))
                    if TWO:
                        far_total = tl.where(other_inside[None, :], far_total, float("inf"))
            if FAR and not (TWO or LINEAR):
                far_peak, far_total, far_delta = near_peak, near_total, near_delta
            # Outside the grid there is no weight: padded queries have none by their total, padded keys need a check.
            taking_part = real[:, None] if KEY_SIDE else other_inside[None, :]
            # A mask is the product of `column` and `line`; `near` and `far` are the gradients of the log masks,
            # `weights` is what multiplies v.
            other = (r + tl.arange(0, OTHER_ROWS))[None, None, :, None]
            if NEAR:
                near_column = column_decay(beta, octets, H, batch, head, i, other, c, stop, LOG, TABLES)
                near_column = spread(near_column, ROWS, COLS, OTHER_ROWS, OTHER_COLS)
            if FAR:
                far_column = column_decay(beta, octets, H, batch, head, i, other, j, stop, LOG, TABLES)
                far_column = spread(far_column, ROWS, COLS, OTHER_ROWS, OTHER_COLS)
                along_other = row_decay(alpha, octets, batch, head, tl.minimum(other, stop - 1), j, c, LOG, TABLES)
                along_other = spread(along_other, ROWS, COLS, OTHER_ROWS, OTHER_COLS)
            if LOG:
                if NEAR:
                    logits = tl.fma(scores, scale, along_row) + near_column
                    weights = softmax_again(logits, near_peak, near_total, unit, taking_part, CHECK)
                    near = unless_certain(weights, weights * (grads * SHARE - near_delta))
                    grad_scores = near
                if FAR:
                    logits = tl.fma(scores, scale, along_other) + far_column
                    softmax = softmax_again(logits, far_peak, far_total, unit, taking_part, CHECK)
                    far = unless_certain(softmax, softmax * (grads * SHARE - far_delta))
                    weights = weights + softmax if NEAR else softmax
                    grad_scores = near + far if NEAR else far
            else:
                if not LINEAR:
                    scores = softmax_again(scores, near_peak, near_total, unit, taking_part, CHECK)
                if KEY_SIDE or LINEAR:
                    if NEAR and FAR:
                        mask = along_row * near_column + along_other * far_column
                    elif NEAR:
                        mask = along_row * near_column
                    elif FAR:
                        mask = along_other * far_column
                    else:
                        mask = tl.full((BLOCK_M, BLOCK_N), 1.0, tl.float32)
                    weights = scores * mask
                weighted = scores * grads
                if NEAR:
                    near = weighted * along_row * near_column
                if FAR:
                    far = weighted * along_other * far_column
                if LINEAR:
                    grad_scores = grads * mask
                else:
                    if NEAR and FAR:
                        weighted = near + far
                    elif NEAR:
                        weighted = near
                    elif FAR:
                        weighted = far
                    grad_scores = unless_certain(scores, weighted - scores * near_delta)

            if LINEAR:
                acc_a = unbounded_product(grad_scores, oa, acc_a, PRECISION)
            else:
                acc_a = product(grad_scores.to(oa.dtype), oa, acc_a, PRECISION)
            if KEY_SIDE and LINEAR:
                acc_b = unbounded_product(weights, ob, acc_b, PRECISION)
            elif KEY_SIDE:
                acc_b = product(weights.to(ob.dtype), ob, acc_b, PRECISION)
            if NEAR or FAR:
                sign = sign_of(row[:, None], r if OTHER_ROWS == 1 else other_row[None, :])
            if NEAR:
                row_sum += near
                column_sum += near * sign
            if FAR:
                far_sum += far * sign

        if NEAR:
            row_sum *= sign_of(col[:, None], other_col[None, :])
            own_alpha += tl.sum(row_sum, 1)
            corner_col = chunk + tl.arange(0, OTHER_COLS)[None, :]
            corner_inside = (rows < H)[:, None] & (corner_col < W)
            corner = -sum_of_columns(row_sum, ROWS, COLS, OTHER_ROWS, OTHER_COLS)
            store_plane(alpha_corner, across, batch, head, rows[:, None], corner_col, corner_inside, corner)
            corner = sum_of_columns(column_sum, ROWS, COLS, OTHER_ROWS, OTHER_COLS)
            store_plane(beta_corner, across, batch, head, rows[:, None], corner_col, corner_inside, corner)

    if NEAR:
        store_plane(alpha_own, 0, batch, head, row, col, inside, own_alpha)
    if FAR:
        store_plane(beta_own, 0, batch, head, row, col, inside, tl.sum(far_sum, 1))
    store_tokens(grad_a, batch, head, row, col, inside, acc_a * scale, D, BLOCK_D)
    if KEY_SIDE:
        store_tokens(grad_b, batch, head, row, col, inside, acc_b * SHARE, DV, BLOCK_DV)

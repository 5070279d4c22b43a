"""Flash attention with the polyline path mask, tiled by grid rows.

A program keeps a tile of tokens fixed, ROWS grid rows of COLS columns, and walks over the other tokens in tiles of
OTHER_ROWS by OTHER_COLS. Between a fixed token (i, j) and another (k, l) there are two paths:

    near: along row i, then along column l      far: along column j, then along row k

With A_i[j, l] the decay within row i and g[i, k, l] the decay within column l, the masks are `A_i[j, l] * g[i, k, l]`
and `g[i, k, j] * A_k[j, l]`. For fixed queries "near" is V2H and "far" is H2V; for fixed keys it is the other way round,
so one backward kernel serves both sides. A and g come from tables (`tables.py`), or where those would be too large from
potentials; A_i does not change while k does. They are loaded as (ROWS, COLS, BLOCK_N), with 1 for an axis on which they
do not depend, and `spread` to the tile (BLOCK_M, BLOCK_N) of scores.

MODE says what the mask does: "hadamard" multiplies the softmax, "logit" adds its logarithm to the scores (one softmax
for each path, averaged), "linear" multiplies the scores themselves. Without near and far there is no mask. Tokens see
those of the same `band` of grid rows; for a softmax the band is the grid.
"""

import triton
import triton.language as tl

from ppma.ops.backends.triton.tiles import (
    LOG2_E,
    decay_between,
    end_softmax,
    head_of,
    kernel,
    load_plane,
    load_potential,
    load_tokens,
    online_softmax,
    product,
    sign_of,
    store_plane,
    store_tokens,
    unbounded_product,
    unless_certain,
)


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
def tables_of(alpha, beta, octets, H, index):
    """Where the tables of a head start. Their padded width is `octets` times 8, so that the compiler knows a factor."""
    return alpha.data + index * H * octets * 8 * octets * 8, beta.data + index * H * H * octets * 8


@triton.jit
def row_decay(alpha, octets, batch, head, row, col, other_col, LOG: tl.constexpr, TABLES: tl.constexpr):
    """A: the decay between two columns of a row. Indices lie within the grid and broadcast."""
    if TABLES:  # alpha is the first row of the head's table
        return tl.load(alpha + ((row * octets * 8 + col) * octets * 8 + other_col))
    else:
        high, low = load_potential(alpha, batch, head, row, col, None)
        other_high, other_low = load_potential(alpha, batch, head, row, other_col, None)
        return decay_between(high, low, other_high, other_low, LOG)


@triton.jit
def column_decay(beta, octets, H, batch, head, row, other_row, col, LOG: tl.constexpr, TABLES: tl.constexpr):
    """g: the decay between two rows of a column. Indices lie within the grid and broadcast."""
    if TABLES:  # beta is the first row of the head's table
        return tl.load(beta + ((row * H + other_row) * octets * 8 + col))
    else:
        high, low = load_potential(beta, batch, head, row, col, None)
        other_high, other_low = load_potential(beta, batch, head, other_row, col, None)
        return decay_between(high, low, other_high, other_low, LOG)


@triton.jit
def spread(x, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Decays that broadcast to (ROWS, COLS, BLOCK_N), as a tile of scores."""
    return tl.reshape(tl.broadcast_to(x, (ROWS, COLS, BLOCK_N)), (ROWS * COLS, BLOCK_N))


@kernel
def attention_forward(
    q, k, v, alpha, beta, valid, out, first, stats, heads, H, W, octets, band, scale,
    MODE: tl.constexpr, V2H: tl.constexpr, H2V: tl.constexpr, TABLES: tl.constexpr, CHECK: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, OTHER_ROWS: tl.constexpr, OTHER_COLS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UPCAST: tl.constexpr,
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
        alpha, beta = tables_of(alpha, beta, octets, H, batch * heads + head)
    i = tl.minimum(top + tl.arange(0, ROWS), H - 1)[:, None, None]
    j = (left + tl.arange(0, COLS))[None, :, None]
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
        c = (key_col if TABLES else tl.minimum(key_col, W - 1))[None, None, :]
        if V2H:
            along_row = spread(row_decay(alpha, octets, batch, head, i, j, c, LOG, TABLES), ROWS, COLS, BLOCK_N)
        for r in range(start, stop, OTHER_ROWS):
            key_row = r + n // OTHER_COLS
            key_inside = (key_row < stop) & (key_col < W)
            if PADDED:
                key_inside = load_plane(valid, 0, batch, head, key_row, key_col, key_inside) != 0
            if MODE == "linear" or PADDED:
                key = load_tokens(k, batch, head, key_row, key_col, key_inside, D, BLOCK_D)
                value = load_tokens(v, batch, head, key_row, key_col, key_inside, DV, BLOCK_DV)
            else:  # copies of other keys in place of those outside, whose logits will be minus infinity
                key_row, clamped = tl.minimum(key_row, stop - 1), tl.minimum(key_col, W - 1)
                key = load_tokens(k, batch, head, key_row, clamped, None, D, BLOCK_D)
                value = load_tokens(v, batch, head, key_row, clamped, None, DV, BLOCK_DV)
            other = r if OTHER_ROWS == 1 else tl.minimum(key_row, stop - 1)[None, None, :]
            if V2H:
                near = spread(column_decay(beta, octets, H, batch, head, i, other, c, LOG, TABLES), ROWS, COLS, BLOCK_N)
            if H2V:
                far = spread(column_decay(beta, octets, H, batch, head, i, other, j, LOG, TABLES), ROWS, COLS, BLOCK_N)
                along_other = spread(
                    row_decay(alpha, octets, batch, head, other, j, c, LOG, TABLES), ROWS, COLS, BLOCK_N
                )
            # After the decays, so that the compiler keeps to the layout of the product for what follows.
            scores = product(queries, key.T, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), UPCAST)
            if LOG:
                if V2H:
                    logits = tl.fma(scores, scale, along_row) + near
                else:
                    logits = tl.fma(scores, scale, along_other) + far
                if CHECK:
                    logits = tl.where(key_inside[None, :], logits, float("-inf"))
                weights, correction, peak, total = online_softmax(logits, peak, total, unit, PADDED)
                acc = product(weights.to(value.dtype), value, acc * correction[:, None], UPCAST)
                if TWO:
                    logits = tl.fma(scores, scale, along_other) + far
                    if CHECK:
                        logits = tl.where(key_inside[None, :], logits, float("-inf"))
                    weights, correction, second_peak, second_total = online_softmax(
                        logits, second_peak, second_total, unit, PADDED
                    )
                    second_acc = product(weights.to(value.dtype), value, second_acc * correction[:, None], UPCAST)
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
                    acc = unbounded_product(scores, value, acc, UPCAST)
                else:
                    acc = product(scores.to(value.dtype), value, acc, UPCAST)

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


@triton.jit
def load_softmax(stats, norms, softmax, batch, head, row, col, mask):
    """Peak, log2 of the total and delta of some queries; weights outside come out as 0."""
    peak = load_plane(stats, 2 * softmax, batch, head, row, col, mask)
    total = load_plane(norms, 2 * softmax, batch, head, row, col, mask, float("inf"))
    return peak, total, load_plane(norms, 2 * softmax + 1, batch, head, row, col, mask)


@triton.jit
def make_norms(stats, norms, softmax, batch, head, row, col, inside, delta):
    """Store and return what the keys' side will load; weights outside come out as 0."""
    peak = load_plane(stats, 2 * softmax, batch, head, row, col, inside)
    total = tl.log2(load_plane(stats, 2 * softmax + 1, batch, head, row, col, inside, float("inf")))
    store_plane(norms, 2 * softmax, batch, head, row, col, inside, total)
    store_plane(norms, 2 * softmax + 1, batch, head, row, col, inside, delta)
    return peak[:, None], total[:, None], delta[:, None]


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
    fixed_a, fixed_b, other_a, other_b, out, first, stats, norms, alpha, beta, valid, grad_a, grad_b,
    alpha_own, alpha_corner, beta_own, beta_corner, heads, H, W, octets, band, scale,
    MODE: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr, KEY_SIDE: tl.constexpr, TABLES: tl.constexpr,
    CHECK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, OTHER_ROWS: tl.constexpr, OTHER_COLS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Gradients that belong to a fixed tile of queries (a = q, b = output gradient) or of keys (a = k, b = v).

    The gradient of a near mask goes to the potentials of the fixed token and of the corner of the path, which lies in
    the fixed row: `*_corner` has one slot for each tile across, so that no two programs write the same place. That of
    a far mask goes to the fixed token's column potential; its other ends belong to the other side. For each softmax
    the queries' side stores in `norms` the log2 of the total and delta, the row sums of the output times its gradient.
    """
    BLOCK_M: tl.constexpr = ROWS * COLS
    BLOCK_N: tl.constexpr = OTHER_ROWS * OTHER_COLS
    LOG: tl.constexpr = MODE == "logit"
    LINEAR: tl.constexpr = MODE == "linear"
    PADDED: tl.constexpr = valid is not None
    TWO: tl.constexpr = LOG and (NEAR and FAR)
    SHARE: tl.constexpr = 0.5 if TWO else 1.0
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
        if TWO:  # the output is the mean of two
            outputs = load_tokens(first, batch, head, row, col, inside, DV, BLOCK_DV)
            first_delta = tl.sum(b.to(tl.float32) * outputs, 1) * SHARE
            far_peak, far_total, far_delta = make_norms(
                stats, norms, FAR_SOFTMAX, batch, head, row, col, inside, delta - first_delta
            )
            delta = first_delta
        near_peak, near_total, near_delta = make_norms(stats, norms, NEAR_SOFTMAX, batch, head, row, col, inside, delta)

    if TABLES:
        alpha, beta = tables_of(alpha, beta, octets, H, batch * heads + head)
    rows = top + tl.arange(0, ROWS)
    i = tl.minimum(rows, H - 1)[:, None, None]
    j = (left + tl.arange(0, COLS))[None, :, None]
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
        c = (other_col if TABLES else tl.minimum(other_col, W - 1))[None, None, :]
        if NEAR:
            along_row = spread(row_decay(alpha, octets, batch, head, i, j, c, LOG, TABLES), ROWS, COLS, BLOCK_N)
            row_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            column_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for r in range(start, stop, OTHER_ROWS):
            other_row = r + n // OTHER_COLS
            other_inside = (other_row < stop) & (other_col < W)
            if PADDED and not KEY_SIDE:
                other_inside = load_plane(valid, 0, batch, head, other_row, other_col, other_inside) != 0
            if LINEAR or PADDED:
                oa = load_tokens(other_a, batch, head, other_row, other_col, other_inside, D, BLOCK_D)
                ob = load_tokens(other_b, batch, head, other_row, other_col, other_inside, DV, BLOCK_DV)
            else:
                clamped_row, clamped = tl.minimum(other_row, stop - 1), tl.minimum(other_col, W - 1)
                oa = load_tokens(other_a, batch, head, clamped_row, clamped, None, D, BLOCK_D)
                ob = load_tokens(other_b, batch, head, clamped_row, clamped, None, DV, BLOCK_DV)
            scores = product(a, oa.T, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), UPCAST)
            grads = product(b, ob.T, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), UPCAST)
            if KEY_SIDE and not LINEAR:
                near_peak, near_total, near_delta = load_softmax(
                    stats, norms, NEAR_SOFTMAX, batch, head, other_row, other_col, other_inside
                )
                near_peak, near_total = near_peak[None, :], near_total[None, :]
                near_delta = near_delta[None, :]
                if TWO:
                    far_peak, far_total, far_delta = load_softmax(
                        stats, norms, FAR_SOFTMAX, batch, head, other_row, other_col, other_inside
                    )
                    far_peak, far_total = far_peak[None, :], far_total[None, :]
                    far_delta = far_delta[None, :]
            if FAR and not (TWO or LINEAR):
                far_peak, far_total, far_delta = near_peak, near_total, near_delta
            # Outside the grid there is no weight: padded queries have none by their total, padded keys need a check.
            taking_part = real[:, None] if KEY_SIDE else other_inside[None, :]
            # A mask is the product of `column` and `line`; `near` and `far` are the gradients of the log masks,
            # `weights` is what multiplies v.
            other = r if OTHER_ROWS == 1 else tl.minimum(other_row, stop - 1)[None, None, :]
            if NEAR:
                near_column = spread(
                    column_decay(beta, octets, H, batch, head, i, other, c, LOG, TABLES), ROWS, COLS, BLOCK_N
                )
            if FAR:
                far_column = spread(
                    column_decay(beta, octets, H, batch, head, i, other, j, LOG, TABLES), ROWS, COLS, BLOCK_N
                )
                along_other = spread(
                    row_decay(alpha, octets, batch, head, other, j, c, LOG, TABLES), ROWS, COLS, BLOCK_N
                )
            if LOG:
                grad_scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                weights = grad_scores
                if NEAR:
                    logits = tl.fma(scores, scale, along_row) + near_column
                    softmax = softmax_again(logits, near_peak, near_total, unit, taking_part, CHECK)
                    near = unless_certain(softmax, softmax * (grads * SHARE - near_delta))
                    weights += softmax
                    grad_scores += near
                if FAR:
                    logits = tl.fma(scores, scale, along_other) + far_column
                    softmax = softmax_again(logits, far_peak, far_total, unit, taking_part, CHECK)
                    far = unless_certain(softmax, softmax * (grads * SHARE - far_delta))
                    weights += softmax
                    grad_scores += far
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
                acc_a = unbounded_product(grad_scores, oa, acc_a, UPCAST)
            else:
                acc_a = product(grad_scores.to(oa.dtype), oa, acc_a, UPCAST)
            if KEY_SIDE and LINEAR:
                acc_b = unbounded_product(weights, ob, acc_b, UPCAST)
            elif KEY_SIDE:
                acc_b = product(weights.to(ob.dtype), ob, acc_b, UPCAST)
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

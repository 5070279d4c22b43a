"""Flash attention with the polyline path mask, tiled by grid rows.

A program keeps a tile of tokens fixed, ROWS grid rows of COLS columns, and walks over the other tokens in tiles that
are part of one grid row. Between a fixed token (i, j) and another (k, l) there are two paths:

    near: along row i, then along column l      far: along column j, then along row k

For fixed queries "near" is V2H and "far" is H2V; for fixed keys it is the other way round, so one backward kernel
serves both sides. What a mask needs from row i does not change while k does; from row k come only vectors. Nothing is
gathered inside the loop, and nothing of size N x N exists.

MODE says what the mask does: "hadamard" multiplies the softmax, "logit" adds its logarithm to the scores (one softmax
for each path, averaged), "linear" multiplies the scores themselves. Tokens see those of the same `band` of grid rows;
for a softmax the band is the grid.
"""

import triton
import triton.language as tl

from ppma.ops.backends.triton.tiles import (
    head_of,
    load_plane,
    load_potential,
    load_softmax,
    load_tokens,
    log_decay,
    online_softmax,
    product,
    scores_of,
    sign_of,
    softmax_again,
    store_plane,
    store_tokens,
    unbounded_product,
    unless_certain,
    with_cuts,
)


@triton.jit
def grid_tile(heads, H, W, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Image and head; first row and number across of the tile; row, column and validity of its tokens."""
    across = tl.cdiv(W, COLS)
    tiles = tl.cdiv(H, ROWS) * across
    batch, head = head_of(tl.program_id(0) // tiles, heads)
    tile = tl.program_id(0) % tiles
    m = tl.arange(0, ROWS * COLS)
    row = tile // across * ROWS + m // COLS
    col = tile % across * COLS + m % COLS
    return batch, head, tile // across * ROWS, tile % across, row, col, (row < H) & (col < W)


@triton.jit
def near_parts(
    alpha, beta, batch, head, top, row, col, inside, other_col, other_inside, ROWS: tl.constexpr, LOG: tl.constexpr
):
    """What the near mask needs of the fixed rows: the decay along them, and their column potentials."""
    if ROWS == 1:  # one row for all fixed tokens: vectors instead of tiles
        corner_row, corner_inside = top, other_inside[None, :]
    else:
        corner_row, corner_inside = row[:, None], inside[:, None] & other_inside[None, :]
    own_high, own_low = load_potential(alpha, batch, head, row, col, inside)
    corner_high, corner_low = load_potential(alpha, batch, head, corner_row, other_col[None, :], corner_inside)
    along_row = log_decay(own_high[:, None], own_low[:, None], corner_high, corner_low)
    if ROWS == 1 and not LOG:
        along_row = tl.exp2(along_row)
    column_high, column_low = load_potential(beta, batch, head, corner_row, other_col[None, :], corner_inside)
    return along_row, column_high, column_low


@triton.jit
def near_mask(
    along_row, column_high, column_low, beta, batch, head, k, other_col, other_inside,
    ROWS: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """The near mask between the fixed tile and a tile of row k, or its natural logarithm."""
    high, low = load_potential(beta, batch, head, k, other_col, other_inside)
    along_column = log_decay(column_high, column_low, high[None, :], low[None, :])
    if LOG:
        return with_cuts(along_row + along_column)
    if ROWS == 1:
        return along_row * tl.exp2(along_column)
    return tl.exp2(along_row + along_column)


@triton.jit
def far_mask(own_high, own_low, alpha, beta, batch, head, k, col, inside, other_col, other_inside, LOG: tl.constexpr):
    """The far mask between the fixed tile and a tile of row k, or its natural logarithm.

    `own` are the column potentials of the fixed tokens. Far from a key is near from a query: the logarithms are the
    same to the last bit, because differences only change their sign and the sum of two does not depend on the order.
    """
    high, low = load_potential(beta, batch, head, k, col, inside)
    along_column = log_decay(own_high, own_low, high, low)
    corner_high, corner_low = load_potential(alpha, batch, head, k, col, inside)
    high, low = load_potential(alpha, batch, head, k, other_col, other_inside)
    along_row = log_decay(corner_high[:, None], corner_low[:, None], high[None, :], low[None, :])
    log_mask = along_row + along_column[:, None]
    return with_cuts(log_mask) if LOG else tl.exp2(log_mask)


@triton.jit
def attention_forward(
    q, k, v, alpha, beta, out, first, stats, heads, H, W, band, scale,
    MODE: tl.constexpr, V2H: tl.constexpr, H2V: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    BLOCK_N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Output, peak and total of each softmax and, of two softmaxes, the output of the first."""
    BLOCK_M: tl.constexpr = ROWS * COLS
    LOG: tl.constexpr = MODE == "logit"
    batch, head, top, _, row, col, inside = grid_tile(heads, H, W, ROWS, COLS)
    queries = load_tokens(q, batch, head, row, col, inside, D, BLOCK_D)
    own_high, own_low = load_potential(beta, batch, head, row, col, inside)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    second_acc, second_peak, second_total = acc, peak, total
    for chunk in range(0, W, BLOCK_N):
        key_col = chunk + tl.arange(0, BLOCK_N)
        key_inside = key_col < W
        if V2H:
            along_row, column_high, column_low = near_parts(
                alpha, beta, batch, head, top, row, col, inside, key_col, key_inside, ROWS, LOG
            )
        for i in range(top // band * band, tl.minimum(top // band * band + band, H)):
            key = load_tokens(k, batch, head, i, key_col, key_inside, D, BLOCK_D)
            value = load_tokens(v, batch, head, i, key_col, key_inside, DV, BLOCK_DV)
            scores = scores_of(queries, key, scale, UPCAST)
            if MODE != "linear":
                scores = tl.where(key_inside[None, :], scores, float("-inf"))
            if V2H:
                near = near_mask(
                    along_row, column_high, column_low, beta, batch, head, i, key_col, key_inside, ROWS, LOG
                )
            if H2V:
                far = far_mask(own_high, own_low, alpha, beta, batch, head, i, col, inside, key_col, key_inside, LOG)
            if MODE == "logit":
                weights, correction, peak, total = online_softmax(scores + (near if V2H else far), peak, total)
                acc = product(weights.to(value.dtype), value, acc * correction[:, None], UPCAST)
                if V2H and H2V:
                    weights, correction, second_peak, second_total = online_softmax(
                        scores + far, second_peak, second_total
                    )
                    second_acc = product(weights.to(value.dtype), value, second_acc * correction[:, None], UPCAST)
            else:
                if MODE == "hadamard":
                    scores, correction, peak, total = online_softmax(scores, peak, total)
                    acc *= correction[:, None]
                if V2H and H2V:
                    near += far
                weights = scores * (near if V2H else far)
                if MODE == "linear":
                    acc = unbounded_product(weights, value, acc, UPCAST)
                else:
                    acc = product(weights.to(value.dtype), value, acc, UPCAST)

    if MODE != "linear":
        acc /= total[:, None]
        store_plane(stats, 0, batch, head, row, col, inside, peak)
        store_plane(stats, 1, batch, head, row, col, inside, total)
    if MODE == "logit" and V2H and H2V:
        second_acc /= second_total[:, None]
        store_plane(stats, 2, batch, head, row, col, inside, second_peak)
        store_plane(stats, 3, batch, head, row, col, inside, second_total)
        store_tokens(first, batch, head, row, col, inside, acc, DV, BLOCK_DV)
        acc = (acc + second_acc) * 0.5
    store_tokens(out, batch, head, row, col, inside, acc, DV, BLOCK_DV)


@triton.jit
def attention_delta(
    grad,
    out,
    first,
    delta,
    heads,
    H,
    W,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """For each softmax the row sums of its output times the gradient. `first` is None where there is one softmax."""
    batch, head, _, _, row, col, inside = grid_tile(heads, H, W, ROWS, COLS)
    grads = load_tokens(grad, batch, head, row, col, inside, DV, BLOCK_DV).to(tl.float32)
    total = tl.sum(grads * load_tokens(out, batch, head, row, col, inside, DV, BLOCK_DV).to(tl.float32), 1)
    if first is not None:  # the output is the mean of two
        one = tl.sum(grads * load_tokens(first, batch, head, row, col, inside, DV, BLOCK_DV), 1)
        store_plane(delta, 1, batch, head, row, col, inside, 2 * total - one)
        total = one
    store_plane(delta, 0, batch, head, row, col, inside, total)


@triton.jit
def load_norms(stats, delta, softmax, batch, head, row, col, inside, share, LOG: tl.constexpr):
    """What `load_softmax` gives, and delta."""
    peak, norm = load_softmax(stats, softmax, batch, head, row, col, inside, LOG)
    return peak, norm, load_plane(delta, softmax, batch, head, row, col, inside) * share


@triton.jit
def attention_backward(
    fixed_a, fixed_b, other_a, other_b, stats, delta, alpha, beta, grad_a, grad_b,
    alpha_own, alpha_corner, beta_own, beta_corner, heads, H, W, band, scale,
    MODE: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr, KEY_SIDE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Gradients that belong to a fixed tile of queries (a = q, b = output gradient) or of keys (a = k, b = v).

    The gradient of a near mask goes to the potentials of the fixed token and of the corner of the path, which lies in
    the fixed row: `*_corner` has one slot for each tile across, so that no two programs write the same place. That of
    a far mask goes to the fixed token's column potential; its other ends belong to the other side. `delta` has for
    each softmax the row sums of the output times its gradient.
    """
    BLOCK_M: tl.constexpr = ROWS * COLS
    LOG: tl.constexpr = MODE == "logit"
    SHARE: tl.constexpr = 0.5 if LOG and NEAR and FAR else 1.0
    # The first softmax is that of V2H, which is far from a key.
    NEAR_PLANE: tl.constexpr = 1 if LOG and NEAR and FAR and KEY_SIDE else 0
    FAR_PLANE: tl.constexpr = 1 if LOG and NEAR and FAR and not KEY_SIDE else 0
    batch, head, top, across, row, col, inside = grid_tile(heads, H, W, ROWS, COLS)
    a = load_tokens(fixed_a, batch, head, row, col, inside, D, BLOCK_D)
    b = load_tokens(fixed_b, batch, head, row, col, inside, DV, BLOCK_DV)
    if MODE != "linear" and not KEY_SIDE:
        near_peak, near_norm, near_delta = load_norms(
            stats, delta, NEAR_PLANE, batch, head, row, col, inside, SHARE, LOG
        )
        near_peak, near_norm, near_delta = near_peak[:, None], near_norm[:, None], near_delta[:, None]
        if FAR_PLANE != NEAR_PLANE:
            far_peak, far_norm, far_delta = load_norms(
                stats, delta, FAR_PLANE, batch, head, row, col, inside, SHARE, LOG
            )
            far_peak, far_norm, far_delta = far_peak[:, None], far_norm[:, None], far_delta[:, None]
        else:
            far_peak, far_norm, far_delta = near_peak, near_norm, near_delta

    own_high, own_low = load_potential(beta, batch, head, row, col, inside)
    acc_a = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    acc_b = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    own_alpha = tl.zeros((BLOCK_M,), tl.float32)
    own_beta = tl.zeros((BLOCK_M,), tl.float32)
    for chunk in range(0, W, BLOCK_N):
        other_col = chunk + tl.arange(0, BLOCK_N)
        other_inside = other_col < W
        valid = inside[:, None] & other_inside[None, :]
        if NEAR:
            along_row, column_high, column_low = near_parts(
                alpha, beta, batch, head, top, row, col, inside, other_col, other_inside, ROWS, LOG
            )
            row_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            column_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in range(top // band * band, tl.minimum(top // band * band + band, H)):
            oa = load_tokens(other_a, batch, head, i, other_col, other_inside, D, BLOCK_D)
            ob = load_tokens(other_b, batch, head, i, other_col, other_inside, DV, BLOCK_DV)
            scores = scores_of(a, oa, scale, UPCAST)
            grads = product(b, ob.T, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), UPCAST)
            if MODE != "linear" and KEY_SIDE:
                near_peak, near_norm, near_delta = load_norms(
                    stats, delta, NEAR_PLANE, batch, head, i, other_col, other_inside, SHARE, LOG
                )
                near_peak, near_norm, near_delta = near_peak[None, :], near_norm[None, :], near_delta[None, :]
                if FAR_PLANE != NEAR_PLANE:
                    far_peak, far_norm, far_delta = load_norms(
                        stats, delta, FAR_PLANE, batch, head, i, other_col, other_inside, SHARE, LOG
                    )
                    far_peak, far_norm, far_delta = far_peak[None, :], far_norm[None, :], far_delta[None, :]
                else:
                    far_peak, far_norm, far_delta = near_peak, near_norm, near_delta

            weights = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            if NEAR:
                near = near_mask(
                    along_row, column_high, column_low, beta, batch, head, i, other_col, other_inside, ROWS, LOG
                )
            if FAR:
                far = far_mask(
                    own_high, own_low, alpha, beta, batch, head, i, col, inside, other_col, other_inside, LOG
                )
            # From here `near` and `far` become the gradients of the log masks, and `weights` what multiplies v.
            if MODE == "logit":
                grad_scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                if NEAR:
                    softmax = softmax_again(scores + near, near_peak, near_norm, valid, LOG)
                    near = unless_certain(softmax, softmax * (grads * SHARE - near_delta))
                    weights += softmax * SHARE
                    grad_scores += near
                if FAR:
                    softmax = softmax_again(scores + far, far_peak, far_norm, valid, LOG)
                    far = unless_certain(softmax, softmax * (grads * SHARE - far_delta))
                    weights += softmax * SHARE
                    grad_scores += far
            else:
                if NEAR:
                    weights += near
                if FAR:
                    weights += far
                if MODE == "hadamard":
                    scores = softmax_again(scores, near_peak, near_norm, valid, LOG)
                    grad_scores = unless_certain(scores, scores * (grads * weights - near_delta))
                else:
                    grad_scores = grads * weights
                weights *= scores
                grads *= scores
                if NEAR:
                    near *= grads
                if FAR:
                    far *= grads

            if MODE == "linear":
                acc_a = unbounded_product(grad_scores, oa, acc_a, UPCAST)
            else:
                acc_a = product(grad_scores.to(oa.dtype), oa, acc_a, UPCAST)
            if KEY_SIDE and MODE == "linear":
                acc_b = unbounded_product(weights, ob, acc_b, UPCAST)
            elif KEY_SIDE:
                acc_b = product(weights.to(ob.dtype), ob, acc_b, UPCAST)
            if NEAR:
                row_sum += near
                column_sum += near * sign_of(row, i)[:, None]
            if FAR:
                own_beta += tl.sum(far, 1) * sign_of(row, i)

        if NEAR:
            row_sum *= sign_of(col[:, None], other_col[None, :])
            own_alpha += tl.sum(row_sum, 1)
            corner_row = (top + tl.arange(0, ROWS))[:, None]
            corner_inside = (corner_row < H) & other_inside[None, :]
            row_sum = -tl.sum(tl.reshape(row_sum, (ROWS, COLS, BLOCK_N)), 1)
            column_sum = tl.sum(tl.reshape(column_sum, (ROWS, COLS, BLOCK_N)), 1)
            store_plane(alpha_corner, across, batch, head, corner_row, other_col[None, :], corner_inside, row_sum)
            store_plane(beta_corner, across, batch, head, corner_row, other_col[None, :], corner_inside, column_sum)

    if NEAR:
        store_plane(alpha_own, 0, batch, head, row, col, inside, own_alpha)
    if FAR:
        store_plane(beta_own, 0, batch, head, row, col, inside, own_beta)
    store_tokens(grad_a, batch, head, row, col, inside, acc_a * scale, D, BLOCK_D)
    if KEY_SIDE:
        store_tokens(grad_b, batch, head, row, col, inside, acc_b, DV, BLOCK_DV)

"""What passes between bands of grid rows in linear attention: one d x dv state for each column of a head.

Sources are pairs of vectors, `a outer b`. Seen from the rows behind a band, all sources before them act through the
states at a reference row e, the last row of the sources:

    S[l] = sum over k of col(l)[e, k] a[k, l] outer b[k, l]                               for paths along a column first
    T[j] = sum over k, l of col(j)[e, k] row(k)[j, l] a[k, l] outer b[k, l]               for paths along a row first

and a token (i, j) reads, with its own vector f,

    near: sum over l of row(i)[j, l] col(l)[i, e] f S[l]        far: col(j)[i, e] f T[j]

States are (B * heads, W, D, DV), float32.
"""

import triton
import triton.language as tl

from ppma.ops.backends.triton.tiles import (
    head_of,
    kernel,
    load_pair,
    load_plane,
    load_tokens,
    log_decay,
    product,
    sign_of,
    store_plane,
    store_tokens,
)


@triton.jit
def load_state(state, index, W, column, D: tl.constexpr, DV: tl.constexpr):
    there = (index.to(tl.int64) * W + column) * (D * DV)
    return tl.load(state + there + tl.arange(0, D)[:, None] * DV + tl.arange(0, DV)[None, :])


@triton.jit
def state_product(vectors, state, acc, PRECISION: tl.constexpr):
    """Vectors @ state. A state sums over many tokens and may leave the range of float16, not that of bfloat16."""
    if vectors.dtype == tl.bfloat16:
        return product(vectors, state.to(tl.bfloat16), acc, PRECISION)
    return product(vectors.to(tl.float32), state, acc, PRECISION)


@kernel
def pass_states(
    a, b, alpha, beta, before, after, heads, W, start, rows, reference, last_reference,
    MIXED: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The state of one column behind a band, from that before it (None before the first). MIXED is T, else S."""
    index, j = tl.program_id(0) // W, tl.program_id(0) % W
    batch, head = head_of(index, heads)
    column = j + tl.arange(0, 1)
    here = column < W
    high, low = load_pair(beta, 0, batch, head, reference, column, here)
    acc = tl.zeros((BLOCK_D, BLOCK_DV), tl.float32)
    if before is not None:
        last_high, last_low = load_pair(beta, 0, batch, head, last_reference, column, here)
        acc = (
            load_state(before, index, W, j, BLOCK_D, BLOCK_DV)
            * tl.exp2(log_decay(high, low, last_high, last_low))[:, None]
        )
    if MIXED:
        for chunk in range(0, W, BLOCK_N):
            col = chunk + tl.arange(0, BLOCK_N)
            inside = col < W
            for i in range(start, start + rows):
                own_high, own_low = load_pair(beta, 0, batch, head, i, column, here)
                corner_high, corner_low = load_pair(alpha, 0, batch, head, i, column, here)
                row_high, row_low = load_pair(alpha, 0, batch, head, i, col, inside)
                decay = log_decay(own_high, own_low, high, low)
                decay = tl.exp2(decay + log_decay(corner_high, corner_low, row_high, row_low))
                left = load_tokens(a, batch, head, i, col, inside, D, BLOCK_D)
                right = load_tokens(b, batch, head, i, col, inside, DV, BLOCK_DV)
                acc = product(left.T, (right * decay[:, None]).to(right.dtype), acc, PRECISION)
    else:
        row = start + tl.arange(0, ROWS)
        inside = row < start + rows
        own_high, own_low = load_pair(beta, 0, batch, head, row, j, inside)
        decay = tl.exp2(log_decay(own_high, own_low, high, low))
        left = load_tokens(a, batch, head, row, j, inside, D, BLOCK_D)
        right = load_tokens(b, batch, head, row, j, inside, DV, BLOCK_DV)
        acc = product(left.T, (right * decay[:, None]).to(right.dtype), acc, PRECISION)
    there = (index.to(tl.int64) * W + j) * (BLOCK_D * BLOCK_DV)
    tl.store(after + there + tl.arange(0, BLOCK_D)[:, None] * BLOCK_DV + tl.arange(0, BLOCK_DV)[None, :], acc)


@triton.jit
def add_to_plane(field, plane, batch, head, row, col, inside, value):
    value += load_plane(field, plane, batch, head, row, col, inside)
    store_plane(field, plane, batch, head, row, col, inside, value)


@kernel
def read_near(
    fixed, second, states, alpha, beta, out, alpha_own, alpha_corner, beta_corner,
    heads, W, start, rows, reference, direction,
    COLS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to `out` what a part of a row reads over the near path; with `second`, the potentials' gradients too.

    `second` is the other vector of the fixed tokens, so that <f S[l], second> is the gradient of a log mask. `direction`
    is the sign of the fixed row minus the sources' rows. Corners have one slot for each tile across.
    """
    tiles = tl.cdiv(W, COLS)
    index, across = tl.program_id(0) // (rows * tiles), tl.program_id(0) % tiles
    batch, head = head_of(index, heads)
    i = start + tl.program_id(0) // tiles % rows
    col = across * COLS + tl.arange(0, COLS)
    inside = col < W
    vectors = load_tokens(fixed, batch, head, i, col, inside, D, BLOCK_D)
    if second is not None:
        seconds = load_tokens(second, batch, head, i, col, inside, DV, BLOCK_DV).to(tl.float32)
    own_high, own_low = load_pair(alpha, 0, batch, head, i, col, inside)
    own_alpha = tl.zeros((COLS,), tl.float32)
    acc = load_tokens(out, batch, head, i, col, inside, DV, BLOCK_DV)
    for l in range(W):
        corner = l + tl.arange(0, 1)
        here = corner < W
        row_high, row_low = load_pair(alpha, 0, batch, head, i, corner, here)
        column_high, column_low = load_pair(beta, 0, batch, head, i, corner, here)
        high, low = load_pair(beta, 0, batch, head, reference, corner, here)
        decay = log_decay(own_high, own_low, row_high, row_low)
        decay = tl.exp2(decay + log_decay(column_high, column_low, high, low))
        read = state_product(
            vectors,
            load_state(states, index, W, l, BLOCK_D, BLOCK_DV),
            tl.zeros((COLS, BLOCK_DV), tl.float32),
            PRECISION,
        )
        read *= decay[:, None]
        acc += read
        if second is not None:
            grad_log_mask = tl.sum(read * seconds, 1)
            signed = grad_log_mask * sign_of(col, l)
            own_alpha += signed
            row_sum = tl.zeros((1,), tl.float32) - tl.sum(signed, 0)
            column_sum = tl.zeros((1,), tl.float32) + tl.sum(grad_log_mask, 0) * direction
            add_to_plane(alpha_corner, across, batch, head, i, corner, here, row_sum)
            add_to_plane(beta_corner, across, batch, head, i, corner, here, column_sum)
    store_tokens(out, batch, head, i, col, inside, acc, DV, BLOCK_DV)
    if second is not None:
        add_to_plane(alpha_own, 0, batch, head, i, col, inside, own_alpha)


@kernel
def read_far(
    fixed, second, states, beta, out, beta_own, heads, W, start, rows, reference, direction,
    ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to `out` what a band's part of a column reads over the far path; `second` and `direction` as above."""
    index, j = tl.program_id(0) // W, tl.program_id(0) % W
    batch, head = head_of(index, heads)
    row = start + tl.arange(0, ROWS)
    inside = row < start + rows
    column = j + tl.arange(0, 1)
    own_high, own_low = load_pair(beta, 0, batch, head, row, j, inside)
    high, low = load_pair(beta, 0, batch, head, reference, column, column < W)
    vectors = load_tokens(fixed, batch, head, row, j, inside, D, BLOCK_D)
    read = state_product(
        vectors, load_state(states, index, W, j, BLOCK_D, BLOCK_DV), tl.zeros((ROWS, BLOCK_DV), tl.float32), PRECISION
    )
    read *= tl.exp2(log_decay(own_high, own_low, high, low))[:, None]
    if second is not None:
        seconds = load_tokens(second, batch, head, row, j, inside, DV, BLOCK_DV).to(tl.float32)
        add_to_plane(beta_own, 0, batch, head, row, j, inside, tl.sum(read * seconds, 1) * direction)
    read += load_tokens(out, batch, head, row, j, inside, DV, BLOCK_DV)
    store_tokens(out, batch, head, row, j, inside, read, DV, BLOCK_DV)

"""Masked attention within grid lines: a program has a tile of one line's tokens and walks over the line.

Fields are (B, heads, lines, positions, channels) by strides: for columns the grid axes are swapped, not copied.
A line's map of attention weights is `softmax * decay` ("hadamard") or the softmax of scores plus log decay ("logit").
Without potentials there is no mask.
"""

import triton
import triton.language as tl

from ppma.ops.backends.triton.tiles import (
    LOG2_E,
    end_softmax,
    head_of,
    kernel,
    load_pair,
    load_plane,
    load_tokens,
    log_decay,
    logits_of,
    online_softmax,
    product,
    sign_of,
    store_plane,
    store_tokens,
    unless_certain,
    with_cuts,
)


@triton.jit
def line_tile(heads, lines, n, BLOCK_M: tl.constexpr):
    """Image, head, line, and the positions of a tile's tokens; tiles of one line are neighbours."""
    tiles = tl.cdiv(n, BLOCK_M)
    index = tl.program_id(0) // tiles
    batch, head = head_of(index // lines, heads)
    return batch, head, index % lines, tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)


@kernel
def line_forward(
    q, k, v, second_v, potential, valid, add, out, second_out, stats, heads, lines, n, scale, share,
    MODE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Out = share * (map @ v + add); second_out = map @ second_v, with the map computed once for both.

    `stats` receives the peak of each softmax and the inverse of its total. `second_v`, `add` and `stats` may be None,
    and so may `valid`, 0 at keys that take no part.
    """
    batch, head, line, position = line_tile(heads, lines, n, BLOCK_M)
    inside = position < n
    queries = load_tokens(q, batch, head, line, position, inside, D, BLOCK_D)
    if potential is not None:
        own_high, own_low = load_pair(potential, 0, batch, head, line, position, inside)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    second_acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, n, BLOCK_N):
        other = start + tl.arange(0, BLOCK_N)
        other_inside = other < n
        if valid is not None:
            other_inside = load_plane(valid, 0, batch, head, line, other, other_inside) != 0
        key = load_tokens(k, batch, head, line, other, other_inside, D, BLOCK_D)
        value = load_tokens(v, batch, head, line, other, other_inside, DV, BLOCK_DV)
        if potential is not None:
            high, low = load_pair(potential, 0, batch, head, line, other, other_inside)
            if MODE == "logit":  # a choice for each key, instead of one for each score
                high = tl.where(other_inside, high, float("-inf"))
            log_mask = log_decay(own_high[:, None], own_low[:, None], high[None, :], low[None, :])
        if MODE == "logit":
            logits = logits_of(queries, key, scale, with_cuts(log_mask), PRECISION)
        else:
            logits = logits_of(queries, key, scale, 0.0, PRECISION)
            logits = tl.where(other_inside[None, :], logits, float("-inf"))
        weights, correction, peak, total = online_softmax(logits, peak, total, LOG2_E, valid is not None)
        if potential is not None and MODE == "hadamard":
            weights *= tl.exp2(log_mask)
        weights = weights.to(value.dtype)
        acc = product(weights, value, acc * correction[:, None], PRECISION)
        if second_v is not None:
            value = load_tokens(second_v, batch, head, line, other, other_inside, DV, BLOCK_DV)
            second_acc = product(weights, value, second_acc * correction[:, None], PRECISION)

    peak, total = end_softmax(peak, total, valid is not None)
    acc /= total[:, None]
    if add is not None:
        acc += load_tokens(add, batch, head, line, position, inside, DV, BLOCK_DV).to(tl.float32)
    store_tokens(out, batch, head, line, position, inside, acc * share, DV, BLOCK_DV)
    if second_v is not None:
        store_tokens(second_out, batch, head, line, position, inside, second_acc / total[:, None], DV, BLOCK_DV)
    if stats is not None:
        store_plane(stats, 0, batch, head, line, position, inside, peak)
        store_plane(stats, 1, batch, head, line, position, inside, 1.0 / total)


@triton.jit
def softmax_again(logits, peak, inverse):
    """The weights of a finished softmax; a single weight is exactly 1.

    Peak and total are kept apart: in their combination, the log-sum-exp, large logits would round the total away.
    """
    return tl.exp2((logits - peak) * LOG2_E) * inverse


@kernel
def line_backward(
    fixed_a, other_a, fixed_b, other_b, second_fixed_b, second_other_b, out, second_out, potential, valid, stats, delta,
    add_a, add_b, grad_a, grad_b, second_grad_b, moved, heads, lines, n, scale, share,
    MODE: tl.constexpr, KEY_SIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients that belong to a tile of queries (a = q, b = output gradient) or of keys (a = k, b = value).

    The map was applied to one value or to two (`second_*` is not None); its gradient is the sum over both. The query
    side stores `delta`, the row sums of softmax times its gradient, which the key side reads. On the key side
    `grad_b` (plus `add_b`) and `second_grad_b` are the transposed map times the output gradients; if `grad_a` is None
    that is all. `moved` receives the gradient of the tile's potentials. What is stored in `grad_a` and `grad_b` is
    multiplied by `share`.
    """
    batch, head, line, position = line_tile(heads, lines, n, BLOCK_M)
    inside = position < n
    real = inside
    if KEY_SIDE and valid is not None:
        real = load_plane(valid, 0, batch, head, line, position, inside) != 0
    a = load_tokens(fixed_a, batch, head, line, position, real, D, BLOCK_D)
    if grad_a is not None:
        b = load_tokens(fixed_b, batch, head, line, position, real, DV, BLOCK_DV)
        if second_other_b is not None:
            second_b = load_tokens(second_fixed_b, batch, head, line, position, real, DV, BLOCK_DV)
    if not KEY_SIDE:
        peak = load_plane(stats, 0, batch, head, line, position, inside)[:, None]
        inverse = load_plane(stats, 1, batch, head, line, position, inside)[:, None]
        outputs = load_tokens(out, batch, head, line, position, inside, DV, BLOCK_DV)
        row_delta = tl.sum(outputs.to(tl.float32) * b.to(tl.float32), 1)
        if second_other_b is not None:
            outputs = load_tokens(second_out, batch, head, line, position, inside, DV, BLOCK_DV)
            row_delta += tl.sum(outputs.to(tl.float32) * second_b.to(tl.float32), 1)
        store_plane(delta, 0, batch, head, line, position, inside, row_delta)
        row_delta = row_delta[:, None]

    if potential is not None:
        own_high, own_low = load_pair(potential, 0, batch, head, line, position, inside)
    acc_a = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    acc_b = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    second_acc_b = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    moved_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # summed over lanes once, behind the loop
    for start in range(0, n, BLOCK_N):
        other = start + tl.arange(0, BLOCK_N)
        other_inside = other < n
        if not KEY_SIDE and valid is not None:
            other_inside = load_plane(valid, 0, batch, head, line, other, other_inside) != 0
        oa = load_tokens(other_a, batch, head, line, other, other_inside, D, BLOCK_D)
        ob = load_tokens(other_b, batch, head, line, other, other_inside, DV, BLOCK_DV)
        if KEY_SIDE:
            peak = load_plane(stats, 0, batch, head, line, other, other_inside)[None, :]
            inverse = load_plane(stats, 1, batch, head, line, other, other_inside)[None, :]
            if grad_a is not None:
                row_delta = load_plane(delta, 0, batch, head, line, other, other_inside)[None, :]
        if potential is not None:
            high, low = load_pair(potential, 0, batch, head, line, other, other_inside)
            log_mask = log_decay(own_high[:, None], own_low[:, None], high[None, :], low[None, :])
        logits = logits_of(a, oa, scale, with_cuts(log_mask) if MODE == "logit" else 0.0, PRECISION)
        softmax = softmax_again(logits, peak, inverse)
        # Queries outside have no weight by their inverse total, which is loaded as 0. Keys outside need a check, but
        # where they are fixed only if they take no part: what belongs to those beyond the line is not stored.
        if not KEY_SIDE:
            softmax = tl.where(other_inside[None, :], softmax, 0.0)
        elif valid is not None:
            softmax = tl.where(real[:, None], softmax, 0.0)
        weights = softmax
        if potential is not None and MODE == "hadamard":
            weights *= tl.exp2(log_mask)
        if KEY_SIDE:
            acc_b = product(weights.to(ob.dtype), ob, acc_b, PRECISION)
        if grad_a is not None:
            grads = product(b, ob.T, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), PRECISION)
            if second_other_b is not None:
                ob = load_tokens(second_other_b, batch, head, line, other, other_inside, DV, BLOCK_DV)
                grads = product(second_b, ob.T, grads, PRECISION)
                if second_grad_b is not None:
                    second_acc_b = product(weights.to(ob.dtype), ob, second_acc_b, PRECISION)
            weighted = weights * grads
            grad_scores = unless_certain(softmax, weighted - softmax * row_delta)
            # "hadamard": d log mask = softmax * mask * G; "logit": the log mask stands beside the score.
            grad_log_mask = weighted if MODE == "hadamard" else grad_scores
            if potential is not None:
                moved_sum += grad_log_mask * sign_of((position - start)[:, None], tl.arange(0, BLOCK_N)[None, :])
            acc_a = product(grad_scores.to(oa.dtype), oa, acc_a, PRECISION)

    if grad_a is not None:
        acc_a *= scale
        if add_a is not None:
            acc_a += load_tokens(add_a, batch, head, line, position, inside, D, BLOCK_D).to(tl.float32)
        store_tokens(grad_a, batch, head, line, position, inside, acc_a * share, D, BLOCK_D)
        if potential is not None:
            store_plane(moved, 0, batch, head, line, position, inside, tl.sum(moved_sum, 1))
    if KEY_SIDE:
        if add_b is not None:
            acc_b += load_tokens(add_b, batch, head, line, position, inside, DV, BLOCK_DV).to(tl.float32)
        store_tokens(grad_b, batch, head, line, position, inside, acc_b * share, DV, BLOCK_DV)
    if second_grad_b is not None:
        store_tokens(second_grad_b, batch, head, line, position, inside, second_acc_b, DV, BLOCK_DV)

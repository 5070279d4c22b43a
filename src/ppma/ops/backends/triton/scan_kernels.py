"""Bidirectional decay scans along grid lines: no logarithms, no divisions, right at decays of 0 and 1.

For a line x with the decay a[m] on the edge before token m, two states arrive at token m:

    u[m] = a[m] (u[m-1] + x[m-1])        from the left, without token m
    r[m] = x[m] + a[m+1] r[m+1]          from the right, with token m

and the line's decay matrix times x is u + r. A program holds CHUNK tokens of a line in registers and carries u on; r is
carried the other way, so where a line is longer than a chunk a kernel of its own collects it at the chunks' ends first.
Fields are (B, heads, before, n, after, channels) with the line along n.
"""

import triton
import triton.language as tl

from ppma.ops.backends.triton.tiles import head_of, index_of, kernel, plane_stride


@triton.jit
def program_line(heads, lines, after, channels, BLOCK_D: tl.constexpr):
    """Number of the line, its image, head and place before and after the scanned axis, and a block of channels."""
    blocks = tl.cdiv(channels, BLOCK_D)
    index = tl.program_id(0) // blocks
    batch, head = head_of(index // lines, heads)
    line = index % lines
    channel = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    return index.to(tl.int64), (batch, head, line // after, line % after), channel


@triton.jit
def line_start(field, line):
    strides = field.strides
    within = index_of(field, line[2]) * strides[2] + index_of(field, line[3]) * strides[4]
    return field.data + (line[0] * strides[0] + line[1] * strides[1]) + within


@triton.jit
def plane_at(field, line, position):
    """Pointers to some positions of a line with a number for each token."""
    codes = field.strides
    start = line[0] * plane_stride(codes[0]) + line[1] * plane_stride(codes[1])
    within = index_of(field, line[2]) * plane_stride(codes[2]) + index_of(field, line[3]) * plane_stride(codes[4])
    return field.data + (start + within) + index_of(field, position) * plane_stride(codes[3])


@triton.jit
def load_decay(log_decay, line, position, n):
    """The decay on the edge before each position; 0 outside the line, whose edges may hold anything."""
    there = plane_at(log_decay, line, position)
    return tl.exp(tl.load(there, mask=(position > 0) & (position < n), other=float("-inf")).to(tl.float32))


@triton.jit
def load_line(x, line, position, inside, channel, channels):
    there = line_start(x, line) + (index_of(x, position)[:, None] * x.strides[3] + channel[None, :] * x.strides[5])
    return tl.load(there, mask=inside[:, None] & (channel < channels)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_line(x, line, position, inside, channel, channels, value):
    there = line_start(x, line) + (index_of(x, position)[:, None] * x.strides[3] + channel[None, :] * x.strides[5])
    tl.store(there, value.to(x.data.dtype.element_ty), mask=inside[:, None] & (channel < channels)[None, :])


@triton.jit
def then(decay, state, next_decay, next_state):
    """Two steps of a recurrence as one."""
    return decay * next_decay, state * next_decay + next_state


@triton.jit
def from_left(before, decay, carry):
    """U of a chunk; `before` has the token before each (none for the first), `carry` what enters the chunk."""
    decay = tl.broadcast_to(decay[:, None], before.shape)
    reach, state = tl.associative_scan((decay, decay * before), 0, then)
    return state + reach * carry[None, :]


@triton.jit
def from_right(here, next_decay, carry):
    """R of a chunk; `carry` is r of the token behind it."""
    next_decay = tl.broadcast_to(next_decay[:, None], here.shape)
    reach, state = tl.associative_scan((next_decay, here), 0, then, reverse=True)
    return state + reach * carry[None, :]


@triton.jit
def token(tile, position, wanted):
    """The row of a tile that belongs to one position."""
    return tl.sum(tl.where((position == wanted)[:, None], tile, 0.0), 0)


@kernel
def right_carries(x, log_decay, carries, heads, lines, after, n, channels, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr):
    """R at the first token of every chunk but the first: carries is (lines of all heads, chunks, channels)."""
    index, line, channel = program_line(heads, lines, after, channels, BLOCK_D)
    chunks = tl.cdiv(n, CHUNK)
    carry = tl.zeros((BLOCK_D,), tl.float32)
    for back in range(chunks - 1):
        chunk = chunks - 1 - back
        position = chunk * CHUNK + tl.arange(0, CHUNK)
        here = load_line(x, line, position, position < n, channel, channels)
        carry = token(from_right(here, load_decay(log_decay, line, position + 1, n), carry), position, chunk * CHUNK)
        tl.store(carries + (index * chunks + chunk) * channels + channel, carry, mask=channel < channels)


@triton.jit
def both_sides(
    x, carries, state, index, line, start, position, decay, next_decay, n, channel, channels, CHUNK: tl.constexpr
):
    """U and r of a chunk that starts at `start`, and the state that enters the next one."""
    chunk, chunks = start // CHUNK, tl.cdiv(n, CHUNK)
    carried = tl.where(n > start + CHUNK, channels, 0)
    carry = tl.load(carries + (index * chunks + chunk + 1) * channels + channel, mask=channel < carried, other=0.0)
    here = load_line(x, line, position, position < n, channel, channels)
    before = load_line(x, line, position - 1, (position > start) & (position < n), channel, channels)
    left = from_left(before, decay, state)
    return left, from_right(here, next_decay, carry), token(left + here, position, start + CHUNK - 1)


@kernel
def scan_lines(
    x, log_decay, carries, add, out, heads, lines, after, n, channels, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Out = decay matrix @ x (+ add), for one line and a block of channels."""
    index, line, channel = program_line(heads, lines, after, channels, BLOCK_D)
    state = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, n, CHUNK):
        position = start + tl.arange(0, CHUNK)
        decay, next_decay = load_decay(log_decay, line, position, n), load_decay(log_decay, line, position + 1, n)
        left, right, state = both_sides(
            x, carries, state, index, line, start, position, decay, next_decay, n, channel, channels, CHUNK
        )
        total = left + right
        if add is not None:
            total += load_line(add, line, position, position < n, channel, channels)
        store_line(out, line, position, position < n, channel, channels, total)


@kernel
def scan_lines_backward(
    grad, x, log_decay, grad_carries, x_carries, add, grad_x, grad_log,
    heads, lines, after, n, channels, slot_stride, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The decay matrix is symmetric, so grad_x is a scan too; d log a[m] = <u_x[m], r_grad[m]> + <u_grad[m], r_x[m]>.

    Each block of channels writes its own slot of `grad_log`.
    """
    index, line, channel = program_line(heads, lines, after, channels, BLOCK_D)
    slot = (tl.program_id(0) % tl.cdiv(channels, BLOCK_D)).to(tl.int64)
    grad_state = tl.zeros((BLOCK_D,), tl.float32)
    x_state = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, n, CHUNK):
        position = start + tl.arange(0, CHUNK)
        inside = position < n
        decay, next_decay = load_decay(log_decay, line, position, n), load_decay(log_decay, line, position + 1, n)
        grad_left, grad_right, grad_state = both_sides(
            grad, grad_carries, grad_state, index, line, start, position, decay, next_decay, n, channel, channels, CHUNK
        )
        total = grad_left + grad_right
        if add is not None:
            total += load_line(add, line, position, inside, channel, channels)
        store_line(grad_x, line, position, inside, channel, channels, total)
        x_left, x_right, x_state = both_sides(
            x, x_carries, x_state, index, line, start, position, decay, next_decay, n, channel, channels, CHUNK
        )
        log = tl.sum(x_left * grad_right + grad_left * x_right, 1)
        tl.store(plane_at(grad_log, line, position) + slot * slot_stride, log, mask=inside)

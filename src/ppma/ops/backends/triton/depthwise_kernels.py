"""Depthwise convolution of channel-last tokens: a program has a block of channels and walks down a band of grid rows.

Fields are (B, 1, H, W, C). Sums are float32. A kernel of K x K taps has them in a tuple, by rows.
"""

import triton
import triton.language as tl

from ppma.ops.backends.triton.tiles import kernel, tokens_at


@triton.jit
def band_tile(H, channels, band, strips, BLOCK_C: tl.constexpr):
    """Image, first row, strip of columns and first channel of a program, and its number among those of a channel."""
    blocks = tl.cdiv(channels, BLOCK_C)
    index = tl.program_id(0) // blocks
    bands = tl.cdiv(H, band)
    batch, row = (index // strips // bands).to(tl.int64), index // strips % bands * band
    return batch, row, index % strips, tl.program_id(0) % blocks * BLOCK_C, index


@triton.jit
def patch_mask(row, col, top, H, W, first, channels, WHOLE: tl.constexpr, BLOCK_C: tl.constexpr):
    """Which of some columns of a row lie in the grid from row `top` on, (columns, BLOCK_C).

    WHOLE says that all channels exist.
    """
    row = tl.zeros_like(col) + row
    inside = (((row >= top) & (row < H)) & ((col >= 0) & (col < W)))[:, None]
    if WHOLE:
        return tl.broadcast_to(inside, (col.shape[0], BLOCK_C))
    else:
        return inside & (first + tl.arange(0, BLOCK_C) < channels)[None, :]


@triton.jit
def load_patch(x, batch, row, col, first, mask, BLOCK_C: tl.constexpr):
    """Some columns of a row, (columns, BLOCK_C) from channel `first` on, zero outside the mask."""
    there = tokens_at(x, batch, 0, row, col, BLOCK_C) + first * x.strides[4]
    return tl.load(there, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_patch(x, batch, row, col, first, mask, value, BLOCK_C: tl.constexpr):
    there = tokens_at(x, batch, 0, row, col, BLOCK_C) + first * x.strides[4]
    tl.store(there, value.to(x.data.dtype.element_ty), mask=mask)


@triton.jit
def load_channels(x, first, channels, stride, WHOLE: tl.constexpr, BLOCK_C: tl.constexpr):
    """A number for each channel, (1, BLOCK_C)."""
    channel = first + tl.arange(0, BLOCK_C)
    there = x + channel * stride
    found = tl.load(there) if WHOLE else tl.load(there, mask=channel < channels, other=0.0)
    return found.to(tl.float32)[None, :]


@triton.jit
def load_taps(weight, first, channels, OWN: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr, BLOCK_C: tl.constexpr):
    """The taps of (C, K, K), (1, BLOCK_C) each; OWN adds the input itself, which is one more in the middle."""
    taps = ()
    for tap in tl.static_range(K * K):
        value = load_channels(weight + tap, first, channels, K * K, WHOLE, BLOCK_C)
        taps = taps + ((value + 1.0) if OWN and tap == K * K // 2 else value,)  # noqa: RUF005
    return taps


@triton.jit
def gelu(x):
    """`x P(X <= x)` for a normal X, and its derivative.

    The tail P(X <= -|x|) is t p(t) exp(-x^2 / 2) with t = 1 / (1 + 0.4 |x| / sqrt 2) and a minimax polynomial p of
    degree 8, relative error 6e-8: a third of the instructions of `erf`. Beyond 16 it is 0; NaN is kept.
    """
    magnitude = tl.abs(x)
    magnitude = tl.where(magnitude > 16.0, 16.0, magnitude)
    t = 1.0 / (0.2828427255 * magnitude + 1.0)
    p = t * 0.01991769299 - 0.0666680187
    p = p * t + 0.03467585519
    p = p * t + 0.05248378962
    p = p * t + 0.03390563279
    p = p * t + 0.09928783774
    p = p * t + 0.1002675444
    p = p * t + 0.1133183986
    p = p * t + 0.1128112972
    bell = tl.exp2(magnitude * magnitude * -0.72134752)
    tail = p * t * bell
    left = tail - magnitude * bell * 0.39894228
    return tl.maximum(x, 0.0) - magnitude * tail, tl.where(x < 0.0, left, 1.0 - left)


@kernel
def depthwise_forward(
    x, weight, bias, residual, out, H, W, channels, band,
    GELU: tl.constexpr, K: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Out = conv(act(x)) + bias + residual, the residual being act(x) if it is None; `bias` may be None.

    An input row reaches the sums of K output rows, so that it is activated K times and not K * K times. The first sum
    is complete then, and the others move up.
    """
    PAD: tl.constexpr = K // 2
    batch, top, strip, first, _number = band_tile(H, channels, band, tl.cdiv(W, BLOCK_W), BLOCK_C)
    taps = load_taps(weight, first, channels, residual is None, K, WHOLE, BLOCK_C)
    zero = tl.zeros((BLOCK_W, BLOCK_C), tl.float32)
    offset = zero
    if bias is not None:
        offset += load_channels(bias, first, channels, 1, WHOLE, BLOCK_C)
    col = strip * BLOCK_W + tl.arange(0, BLOCK_W)
    sums = (zero,) * K
    for step in range(0, band + K - 1):
        row = top - PAD + step
        for dx in tl.static_range(K):
            mask = patch_mask(row, col + (dx - PAD), 0, H, W, first, channels, WHOLE, BLOCK_C)
            value = load_patch(x, batch, row, col + (dx - PAD), first, mask, BLOCK_C)
            if GELU:
                value, _slope = gelu(value)
            longer = ()
            for place in tl.static_range(K):  # the output row `row - PAD + place`
                longer = longer + (sums[place] + value * taps[(K - 1 - place) * K + dx],)  # noqa: RUF005
            sums = longer
        done = row - PAD
        mask = patch_mask(done, col, top, H, W, first, channels, WHOLE, BLOCK_C)
        result = sums[0] + offset
        if residual is not None:
            result += load_patch(residual, batch, done, col, first, mask, BLOCK_C)
        store_patch(out, batch, done, col, first, mask, result, BLOCK_C)
        moved = ()
        for place in tl.static_range(1, K):
            moved = moved + (sums[place],)  # noqa: RUF005
        sums = moved + (zero,)  # noqa: RUF005


@kernel
def depthwise_backward(
    grad, x, weight, grad_x, sums, H, W, channels, band,
    OWN: tl.constexpr, GELU: tl.constexpr, K: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and the sums over a band that belong to the gradients of the taps and of the bias.

    OWN says that act(x) itself was added. `sums` is (programs, K * K + 1, channels), the bias last.
    """
    PAD: tl.constexpr = K // 2
    batch, top, _strip, first, number = band_tile(H, channels, band, 1, BLOCK_C)
    taps = load_taps(weight, first, channels, OWN, K, WHOLE, BLOCK_C)
    zero = tl.zeros((BLOCK_W, BLOCK_C), tl.float32)
    tap_sums = (zero,) * (K * K)
    bias_sum = zero
    across = tl.cdiv(W, BLOCK_W)
    for step in range(0, band * across):
        row = top + step // across  # the last band may end below the grid
        col = step % across * BLOCK_W + tl.arange(0, BLOCK_W)
        mask = patch_mask(row, col, 0, H, W, first, channels, WHOLE, BLOCK_C)
        value = load_patch(x, batch, row, col, first, mask, BLOCK_C)
        active = value
        if GELU:
            active, slope = gelu(value)
        total = zero
        longer = ()
        for tap in tl.static_range(K * K):
            other_row, other_col = row + (PAD - tap // K), col + (PAD - tap % K)
            other_mask = patch_mask(other_row, other_col, 0, H, W, first, channels, WHOLE, BLOCK_C)
            g = load_patch(grad, batch, other_row, other_col, first, other_mask, BLOCK_C)
            total += g * taps[tap]
            longer = longer + (tap_sums[tap] + g * active,)  # noqa: RUF005
            if tap == K * K // 2:
                bias_sum += tl.where(mask, g, 0.0)
        tap_sums = longer
        if GELU:
            total *= slope
        store_patch(grad_x, batch, row, col, first, mask, total, BLOCK_C)

    channel = first + tl.arange(0, BLOCK_C)
    there = sums + number.to(tl.int64) * ((K * K + 1) * channels) + channel
    for tap in tl.static_range(K * K):
        tl.store(there + tap * channels, tl.sum(tap_sums[tap], 0), mask=channel < channels)
    tl.store(there + K * K * channels, tl.sum(bias_sum, 0), mask=channel < channels)

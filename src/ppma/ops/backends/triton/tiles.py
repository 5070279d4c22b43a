"""Pieces that several kernels share: tensors with strides, tiles of tokens, matrix products, decays from potentials.

The log decay between tokens a and b of one line is `-|c_a - c_b|` with the potentials c of `potentials.py`. Which of
the two comes first is always decided by position, never by comparing potentials: they are equal where a decay is 1.
"""

import inspect
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Field(NamedTuple):
    """A tensor as kernels take it. An absent one is None, which kernels see at compile time.

    Attributes:
        data: the tensor.
        strides: of every axis, in elements.
        wide: 1 where offsets within an image need 64 bits, else None, which costs nothing.
    """

    data: Any
    strides: Any
    wide: Any = None


def field(tensor: Tensor) -> Field:
    """Vectors of channels. The first two axes are batch and heads, whose offsets have 64 bits in any case.

    The strides are multiples of the channels at every image size. The compiler specialises a kernel for that, and only
    then knows which loads it may widen.
    """
    strides = tensor.stride()
    return Field(tensor, strides, _wide(tensor.shape, strides))


def plane(tensor: Tensor) -> Field:
    """A number for each token; the first two axes are planes and batch (or batch and heads).

    Strides are multiples of 16 at some image sizes and not at others. Within a tuple Triton cannot be told not to
    specialise for that, so they are passed as numbers that never are; `plane_stride` restores them. A unit stride is
    still seen by the compiler.
    """
    return Field(tensor, *_plane_layout(tensor.shape, tensor.stride()))


# Layouts repeat from block to block and from step to step.
@lru_cache(maxsize=4096)
def _wide(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """1 where an offset along the last axes, all but two, needs 64 bits."""
    reach = sum((extent - 1) * stride for extent, stride in zip(shape[2:], strides[2:], strict=True))
    return 1 if reach >= 2**31 else None


@lru_cache(maxsize=4096)
def _plane_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], int | None]:
    return tuple(16 * stride - 15 for stride in strides), _wide(shape, strides)


@triton.jit
def plane_stride(code):
    """The stride that `plane` passed."""
    return (code + 15) >> 4


def padding_plane(valid: Tensor, heads: int) -> Field:
    """A (B, H, W) of truth values as a plane, the same for all heads."""
    return plane(valid.view(torch.uint8)[None, :, None].expand(1, -1, heads, -1, -1))


# Extents and counts are not specialised, so that a kernel compiled for one image size serves others.
_EXTENTS = {
    "heads", "H", "W", "band", "lines", "n", "slots", "after", "channels", "slot_stride", "octets", "tokens",
    "start", "rows", "reference", "last_reference", "direction",
}  # fmt: skip


def kernel(function: Any) -> Any:
    """`triton.jit` for a function that is launched."""
    extents = [name for name in inspect.signature(function).parameters if name in _EXTENTS]
    return triton.jit(function, do_not_specialize=extents)


LOG2_E = tl.constexpr(1.4426950408889634)

# The least that an edge counts in a potential, and what a log mask across such an edge lies below, rounding included.
CUT = tl.constexpr(-32768.0)
BELOW_CUT = tl.constexpr(-16384.0)


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """`acc + a @ b` with float32 accumulation.

    PRECISION is that of float32 operands, "ieee" or "tf32"; or "upcast" for the interpreter, whose bfloat16 product is
    wrong.
    """
    if PRECISION == "upcast":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def unbounded_product(a, b, acc, PRECISION: tl.constexpr):
    """`acc + a @ b` with a in float32, of any size: for float16 the rows of a are scaled into its range."""
    if b.dtype != tl.float16:
        return product(a.to(b.dtype), b, acc, PRECISION)
    else:
        largest = tl.maximum(tl.max(tl.abs(a), 1), 1e-30)[:, None]
        zeros = tl.zeros((a.shape[0], b.shape[1]), tl.float32)
        return acc + product((a / largest).to(b.dtype), b, zeros, PRECISION) * largest


@triton.jit
def logits_of(fixed, others, scale, log_mask, PRECISION: tl.constexpr):
    """`scale * (fixed @ others^T) + log_mask`: the one definition for forward and backward kernels.

    The backward kernels subtract the largest logit that the forward kernel found, so both need the same bits: where a
    logit is 1e8, one unit in its last place is a factor of e^8. Hence one function, with the channels in one piece, and
    an explicit `fma` for the scale, which the compiler cannot split or fuse in another way. Whether queries or
    keys are fixed makes no difference: in float32 a product is a chain of fused multiply-adds over the channels, and
    matrix units sum exact products of the same channels. (Transposing the tile of a fixed key instead spills hundreds
    of bytes of registers.)
    """
    zeros = tl.zeros((fixed.shape[0], others.shape[0]), tl.float32)
    return tl.fma(product(fixed, others.T, zeros, PRECISION), scale, log_mask)


@triton.jit
def head_of(index, heads):
    """Image and head; 64 bits, because a batch may have more than 2^31 elements."""
    return (index // heads).to(tl.int64), (index % heads).to(tl.int64)


@triton.jit
def index_of(field, index):
    """An index along an axis of the grid, of as many bits as offsets in this field need."""
    if field.wide is not None:
        return index * tl.full((), 1, tl.int64)  # a loop's index is a plain number in the interpreter
    else:
        return index


@triton.jit
def tokens_at(field, batch, head, row, col, BLOCK_D: tl.constexpr):
    """Pointers to the channels of some tokens, (tokens, BLOCK_D)."""
    strides = field.strides
    tokens = index_of(field, row) * strides[2] + index_of(field, col) * strides[3]
    channels = tl.arange(0, BLOCK_D) * strides[4]
    return field.data + (batch * strides[0] + head * strides[1]) + (tokens[:, None] + channels[None, :])


@triton.jit
def load_tokens(field, batch, head, row, col, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The vectors of some tokens, (tokens, BLOCK_D), zero outside; `inside` is None where all exist.

    `field` is (B, heads, rows, cols, D).
    """
    there = tokens_at(field, batch, head, row, col, BLOCK_D)
    channel = tl.arange(0, BLOCK_D)[None, :]
    if inside is not None:
        return tl.load(there, mask=inside[:, None] & (channel < D), other=0.0)
    elif D != BLOCK_D:
        return tl.load(there, mask=tl.broadcast_to(channel < D, there.shape), other=0.0)
    else:
        return tl.load(there)


@triton.jit
def store_tokens(field, batch, head, row, col, inside, value, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The counterpart of `load_tokens`, converting to the type of the tensor."""
    mask = inside[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    tl.store(tokens_at(field, batch, head, row, col, BLOCK_D), value.to(field.data.dtype.element_ty), mask=mask)


@triton.jit
def plane_at(field, number, batch, head, row, col):
    """Pointers to tokens in one plane of a (planes, B, heads, rows, cols) with a number for each token."""
    codes = field.strides
    start = (tl.zeros_like(batch) + number) * plane_stride(codes[0])
    start += batch * plane_stride(codes[1]) + head * plane_stride(codes[2])
    within = index_of(field, row) * plane_stride(codes[3]) + index_of(field, col) * plane_stride(codes[4])
    return field.data + start + within


@triton.jit
def load_plane(field, number, batch, head, row, col, mask, other=0):
    """Numbers of some tokens, zero outside; `row` and `col` may have any shape, `mask` None where all exist."""
    if mask is None:
        return tl.load(plane_at(field, number, batch, head, row, col))
    else:
        return tl.load(plane_at(field, number, batch, head, row, col), mask=mask, other=other)


@triton.jit
def store_plane(field, number, batch, head, row, col, mask, value):
    tl.store(plane_at(field, number, batch, head, row, col), value.to(field.data.dtype.element_ty), mask=mask)


@triton.jit
def pack_pair(high, low):
    """Two float32 numbers in one word, so that they travel together."""
    word = high.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return word | (low.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def load_pair(field, number, batch, head, row, col, mask):
    """The two numbers of some tokens in one plane of words."""
    word = load_plane(field, number, batch, head, row, col, mask)
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True), word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def log_decay(high_a, low_a, high_b, low_b):
    """Log decay between tokens of one line, to the base of the potentials.

    High parts are close when it matters, and cancel exactly.
    """
    return -tl.abs((high_a - high_b) + (low_a - low_b))


@triton.jit
def with_cuts(log_mask):
    """A log mask to be added to scores, however large they are: across an edge with a decay of 0 nothing counts.

    Such a log mask falls to -1e30 and below; others stay as they are. The steep line needs no register for a choice.
    """
    return tl.minimum(log_mask, tl.fma(log_mask, 1e26, -1e26 * BELOW_CUT))


@triton.jit
def decay_between(high_a, low_a, high_b, low_b, LOG: tl.constexpr):
    """The decay between tokens of one line or, if LOG, its natural logarithm, which falls to -1e30 across a cut."""
    log_mask = log_decay(high_a, low_a, high_b, low_b)
    return tl.where(log_mask < BELOW_CUT, -1e30, log_mask) if LOG else tl.exp2(log_mask)


@triton.jit
def sign_of(a, b):
    """sign(a - b) of integer positions, as float32; below 2^24, so that the difference is exact."""
    return tl.clamp(a * 1.0 - b * 1.0, -1.0, 1.0)  # three instructions; comparisons take five


@triton.jit
def online_softmax(logits, peak, total, unit, EMPTY: tl.constexpr):
    """One step of a running softmax: weights, correction of what was summed before, new peak, new total.

    `unit` takes differences of logits to base 2. EMPTY says that there may be rows without a finite logit.
    """
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    finite = tl.maximum(new_peak, -3e38) if EMPTY else new_peak
    weights = tl.exp2((logits - finite[:, None]) * unit)
    correction = tl.exp2((peak - finite) * unit)
    return weights, correction, new_peak, total * correction + tl.sum(weights, 1)


@triton.jit
def end_softmax(peak, total, EMPTY: tl.constexpr):
    """Peak and total of a finished softmax, those of an empty row such that its weights are 0.

    A row is empty if every key takes no part or lies behind a cut, where log masks are -1e30 and less.
    """
    if EMPTY:
        empty = peak < -1e29
        return tl.where(empty, 0.0, peak), tl.where(empty, float("inf"), total)
    else:
        return peak, total


@triton.jit
def unless_certain(softmax, gradient):
    """The gradient of a logit; 0 where its weight is exactly 1.

    There the exact gradient is 0, and what rounding leaves would be multiplied with a large key. (Rounding the weight
    down takes fewer registers than a choice.)
    """
    return gradient - gradient * tl.floor(softmax)

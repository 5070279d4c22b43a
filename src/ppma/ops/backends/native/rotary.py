"""Glue to csrc/rotary.cpp."""

from ctypes import POINTER, c_float, c_int, c_int64, c_void_p

from torch import Tensor

from ppma.ops.backends.native.library import Kernel, View, contiguous_address, threads

_VIEW = POINTER(View)
_rotate = Kernel("ppma_rotate", _VIEW, c_void_p, c_void_p, _VIEW, POINTER(c_int64), c_float, c_int)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, back: bool) -> None:
    """Turn x (B, N, groups * d) into out by the angles of each token, or turn it back.

    Args:
        x: last axis of unit stride.
        cos: (N, d), contiguous, equal for both channels of a pair.
        sin: (N, d), contiguous.
        out: like x, last axis of unit stride.
        back: turn by the negative angles.
    """
    batch, tokens, channels = x.shape
    groups, rest = divmod(channels, cos.shape[-1])
    if rest or x.stride(-1) != 1 or out.stride(-1) != 1:
        raise ValueError(
            f"native kernels: expected channels side by side, a multiple of {cos.shape[-1]}, "
            f"got shape {tuple(x.shape)}, strides {x.stride()} and {out.stride()}"
        )
    angles = (tokens, cos.shape[-1])
    _rotate(
        View.of(x, x.shape),
        contiguous_address(cos, angles),
        contiguous_address(sin, angles),
        View.of(out, x.shape),
        (c_int64 * 4)(batch, tokens, groups, cos.shape[-1]),
        -1.0 if back else 1.0,
        threads(),
    )

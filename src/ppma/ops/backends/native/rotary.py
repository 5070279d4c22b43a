"""Glue to csrc/rotary.cpp."""

from ctypes import POINTER, c_float, c_int, c_int64, c_void_p

from torch import Tensor

from ppma.ops.backends.native.library import Kernel, View, threads

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
    groups = x.shape[-1] // cos.shape[-1]
    sizes = (c_int64 * 4)(x.shape[0], x.shape[1], groups, cos.shape[-1])
    turn = -1.0 if back else 1.0
    _rotate(View.of(x), cos.data_ptr(), sin.data_ptr(), View.of(out), sizes, turn, threads())

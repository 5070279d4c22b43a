"""A linear layer with packed weights and what stands around it in a block, for inference: csrc/packed_linear.cpp."""

from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from ppma.ops.backends.native.library import Kernel, address, contiguous_address, loaded, threads


class _Params(Structure):
    """`struct PackedLinearParams` of csrc/packed_linear.h."""

    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("residual_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("rows", c_int64),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("norm_eps", c_float),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("rotated", c_int64),
        ("head_dim", c_int64),
        ("tokens", c_int64),
        ("threads", c_int),
    )


_pack = Kernel("ppma_pack_linear", c_void_p, c_int64, c_int64, c_void_p)
_kernel = Kernel("ppma_packed_linear", POINTER(_Params))


def pack(weight: Tensor) -> Tensor:
    """The weights (outputs, inputs) in the order in which the kernels of the instruction set in use read them."""
    size = loaded().ppma_packed_linear_size
    size.argtypes, size.restype = (c_int64, c_int64), c_int64
    weight = weight.detach().contiguous()
    packed = torch.empty(size(*weight.shape), dtype=torch.float32)
    _pack(contiguous_address(weight, weight.shape), *weight.shape, contiguous_address(packed, packed.shape))
    return packed


def packed_linear(
    x: Tensor,
    packed: Tensor,
    outputs: int,
    bias: Tensor | None,
    *,
    residual: Tensor | None = None,
    norm_eps: float | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    rotated: int = 0,
) -> Tensor:
    """`residual + linear(layer_norm(x))`, its first channels rotated.

    Args:
        x: (rows, inputs), float32, last axis of unit stride.
        packed: from `pack`.
        outputs: rows of the weight.
        bias: (outputs,) or None.
        residual: (rows, outputs), added to the result, or None.
        norm_eps: eps of a layer norm of x without scale and shift (fold these into the layer), None for no norm.
        rotary: cosines and alternating sines (-sin, sin), (tokens, head_dim); row r of x is token r % tokens.
        rotated: how many outputs are rotated, a multiple of head_dim.

    Returns:
        (rows, outputs).
    """
    rows, inputs = x.shape
    out = torch.empty(rows, outputs, dtype=torch.float32)
    params = _Params(
        x=address(x, x.shape),
        x_stride=x.stride(0),
        packed=contiguous_address(packed, packed.shape),
        bias=None if bias is None else contiguous_address(bias, (outputs,)),
        residual=None if residual is None else address(residual, out.shape),
        residual_stride=0 if residual is None else residual.stride(0),
        out=address(out, out.shape),
        out_stride=outputs,
        rows=rows,
        inputs=inputs,
        outputs=outputs,
        norm_eps=-1.0 if norm_eps is None else norm_eps,
        rotated=rotated,
        threads=threads(),
    )
    if rotary is not None:
        cosine, sine = rotary
        params.cosine, params.sine = (contiguous_address(table, table.shape) for table in (cosine, sine))
        params.tokens, params.head_dim = cosine.shape
    _kernel(byref(params))
    return out

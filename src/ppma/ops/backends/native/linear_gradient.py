"""Gradients of linear layers in training: csrc/linear_gradient.cpp for weight and bias, a packed product for the input.

Images that count nothing are left out of both.
"""

import struct
from collections.abc import Iterator, Sequence
from ctypes import addressof, c_int64, c_void_p
from itertools import groupby

import torch
from torch import Tensor

from ppma.ops.backends.native import library
from ppma.ops.backends.native.fused_linear import pack, run
from ppma.ops.backends.native.library import Kernel, address, contiguous_address
from ppma.ops.backends.native.params import unit_stride

_PARAMS = struct.Struct("PPP5qPPfi")  # Params of csrc/linear_gradient.cpp
_kernel = Kernel("ppma_linear_gradient", c_void_p)


def runs(counts: Sequence[float], tokens: int) -> Iterator[tuple[bool, slice]]:
    """Rows of images that follow one another and all count, or all do not; `tokens` rows are an image."""
    first = 0
    for kept, images in groupby(counts, bool):
        here = slice(first, first + tokens * len(list(images)))
        yield kept, here
        first = here.stop


def input_gradient(grad: Tensor, weight: Tensor, counts: Sequence[float], scale: float) -> Tensor:
    """`scale * grad weight` of the images that count, 0 of the others.

    Args:
        grad: (rows, outputs).
        weight: (outputs, inputs).
        counts: what each image counts, 0 or `scale`.
        scale: a common factor.

    Returns:
        (rows, inputs).
    """
    out = torch.empty((len(grad), weight.shape[1]), dtype=torch.float32, device=grad.device)
    packed = pack(weight.mT, scale=scale)
    for kept, here in runs(counts, len(grad) // len(counts)):
        if kept:
            run(grad[here], packed, None, None, out[here])
        else:
            out[here] = 0.0
    return out


def weight_gradients(grad: Tensor, x: Tensor, counts: Sequence[float], scale: float) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias, `scale * grad^T x` and `scale * sum(grad)` over the images that count.

    Args:
        grad: (rows, outputs), whose rows may lie apart.
        x: (rows, inputs).
        counts: what each image counts, 0 or `scale`.
        scale: a common factor.

    Returns:
        (outputs, inputs) and (outputs,).
    """
    (rows, inputs), outputs = x.shape, grad.shape[1]
    library.require_tokens((inputs, outputs))
    of_weight, of_bias = (
        torch.empty(shape, dtype=torch.float32, device=x.device) for shape in ((outputs, inputs), (outputs,))
    )
    kept = [image for image, count in enumerate(counts) if count]
    if not kept or not rows:
        return of_weight.zero_(), of_bias.zero_()
    grad, x = unit_stride(grad), x.contiguous()
    images = (c_int64 * len(kept))(*kept)
    _kernel(
        _PARAMS.pack(
            contiguous_address(x, (rows, inputs)),
            address(grad, (rows, outputs)),
            addressof(images),
            len(kept),
            rows // len(counts),
            inputs,
            outputs,
            grad.stride(0),
            contiguous_address(of_weight, (outputs, inputs)),
            contiguous_address(of_bias, (outputs,)),
            scale,
            library.threads(),
        )
    )
    return of_weight, of_bias

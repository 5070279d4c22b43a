"""Convolutions and whole blocks for inference, one after the other in one call: csrc/layers.cpp."""

import math
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from ppma.ops.backends.contract import BackendUnavailableError, BlockWeights, Conv3x3Weights
from ppma.ops.backends.native.fused_block import block_parameters
from ppma.ops.backends.native.fused_conv import conv_parameters, uses_winograd
from ppma.ops.backends.native.library import Kernel, address, contiguous_address, contiguous_view, view

_BLOCK, _CONV, _WINOGRAD_CONV = range(3)  # Kind of csrc/layers.cpp
_kernel = Kernel("ppma_layers", c_void_p, c_void_p, c_int64)


def fused_layers(x: Tensor, layers: Sequence[BlockWeights | Conv3x3Weights]) -> Tensor:
    """See `Backend.fused_layers`."""
    if torch.is_grad_enabled() and x.requires_grad:
        raise BackendUnavailableError("native kernels: fused_layers has no gradient")
    if isinstance(layers[0], BlockWeights):  # convolutions read any strides
        x = x.contiguous()
    shapes: list[tuple[int, ...]] = [tuple(x.shape)]
    for layer in layers:
        shapes.append(layer.output_shape(shapes[-1]))
    out = torch.empty(shapes[-1], dtype=torch.float32, device=x.device)
    # Between two convolutions the kernel has memory of its own; other layers write to two tensors in turns.
    convs = [isinstance(layer, Conv3x3Weights) for layer in layers]
    writing = [index for index in range(len(layers) - 1) if not (convs[index] and convs[index + 1])]
    targets = [0] * (len(layers) - 1) + [contiguous_address(out, shapes[-1])]
    between = []
    for turn in (writing[::2], writing[1::2]):
        size = max((math.prod(shapes[index + 1]) for index in turn), default=0)
        between.append(torch.empty(size, dtype=torch.float32, device=x.device))
        place = contiguous_address(between[-1], (size,))
        for index in turn:
            targets[index] = place

    kinds, params, source = [], [], address(x, shapes[0])
    for layer, shape, target in zip(layers, shapes[:-1], targets, strict=True):
        if isinstance(layer, BlockWeights):
            kinds.append(_BLOCK)
            params.append(block_parameters(layer, shape, source, target))
        else:
            kinds.append(_WINOGRAD_CONV if uses_winograd(layer.weight, layer.stride) else _CONV)
            params.append(contiguous_view(source, shape) if len(kinds) > 1 else view(x, shape))
            params.append(conv_parameters(shape, layer, target))
        source = target
    _kernel(bytes(kinds), b"".join(params), len(layers))
    return out

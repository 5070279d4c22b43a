"""A whole block for inference: csrc/block.cpp."""

import struct
from ctypes import c_void_p

import torch
from torch import Tensor

from ppma.ops.backends.contract import BackendUnavailableError, BlockWeights, ConvWeights, LinearWeights
from ppma.ops.backends.native import library
from ppma.ops.backends.native.fused_linear import packed_address, rotates
from ppma.ops.backends.native.library import Kernel, contiguous_address

_PARAMS = struct.Struct("PP6q14PffPPqPPPiiiiii")  # BlockParams of csrc/block.h
_kernel = Kernel("ppma_block", c_void_p)


def fused_block(x: Tensor, block: BlockWeights) -> Tensor:
    """See `Backend.fused_block`."""
    _, height, width, dim = x.shape
    head_dim, hidden = dim // block.heads, block.reduce.weight.shape[1]
    library.require_tokens((height, width, dim, hidden))
    if torch.is_grad_enabled() and x.requires_grad:
        raise BackendUnavailableError("native kernels: fused_block has no gradient")
    if not rotates(2 * dim, head_dim):
        raise BackendUnavailableError(f"native kernels: fused_block cannot rotate {2 * dim} in heads of {head_dim}")
    decays, bias, rate, softplus, fixed = 0, 0, 0, False, 0
    if block.decay is not None:
        logits, scale, softplus = block.decay
        shape = logits.shape
        decays, logits = shape[1], logits.contiguous()
        scale = None if scale is None else scale.contiguous()
        bias, rate = contiguous_address(logits, shape), 0 if scale is None else contiguous_address(scale, shape)
    elif block.log_decay is not None:
        fixed = contiguous_address(block.log_decay, (block.heads,))
    else:
        raise ValueError("fused_block: expected learned or constant decays, got neither")
    columns = 3 * dim + block.heads * decays
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    params = _PARAMS.pack(
        contiguous_address(x, x.shape),
        contiguous_address(out, x.shape),
        *x.shape,
        block.heads,
        hidden,
        *_depthwise(block.position, dim, 3),
        *_depthwise(block.local, dim, 5),
        *_depthwise(block.mix, hidden, 3),
        *_linear(block.qkv, columns, dim),
        *_linear(block.proj, dim, dim),
        *_linear(block.expand, hidden, dim),
        *_linear(block.reduce, dim, hidden),
        block.qkv.norm_eps,
        block.expand.norm_eps,
        *(contiguous_address(table, (height * width, head_dim // 2)) for table in block.rotary),
        decays,
        bias,
        rate,
        fixed,
        softplus,
        block.full,
        block.combine == "logit",
        block.paths != "h2v",
        block.paths != "v2h",
        library.threads(),
    )
    _kernel(params)
    return out


def _depthwise(conv: ConvWeights, channels: int, size: int) -> tuple[int, int]:
    return contiguous_address(conv.weight, (channels, 1, size, size)), contiguous_address(conv.bias, (channels,))


def _linear(layer: LinearWeights, outputs: int, inputs: int) -> tuple[int, int]:
    if layer.weight.shape != (outputs, inputs):
        raise ValueError(f"fused_block: expected a weight of {(outputs, inputs)}, got {tuple(layer.weight.shape)}")
    return packed_address(layer.packed, lambda: layer.weight), contiguous_address(layer.bias, (outputs,))

"""The parameters of whole blocks for inference: csrc/block.cpp."""

import struct
from collections.abc import Sequence

from torch import Tensor

from ppma.ops.backends.contract import BackendUnavailableError, BlockWeights, ConvWeights, LinearWeights
from ppma.ops.backends.native import library
from ppma.ops.backends.native.fused_linear import packed_weight, rotates
from ppma.ops.backends.native.library import contiguous_address

# BlockParams of csrc/block.h: what changes from call to call, and the rest.
_IMAGES = struct.Struct("PPq")
_BLOCK = struct.Struct("5q11PffPPqPPPPiiiiii")
_LINE = 16  # floats; kCacheLine of csrc/simd.h


def block_parameters(block: BlockWeights, shape: Sequence[int], x: int, out: int) -> bytes:
    """`BlockParams` of images (B, H, W, dim) at an address, with the address of the result."""
    key = (library.isa(), library.threads(), *shape[1:])
    if key not in block.kept:
        block.kept[key] = _parameters(block, *shape[1:])
    return _IMAGES.pack(x, out, shape[0]) + block.kept[key][0]


def _parameters(block: BlockWeights, height: int, width: int, dim: int) -> tuple[bytes, list[Tensor]]:
    """`_BLOCK`, and the tensors to keep alive for it beside those of the block."""
    head_dim, hidden = dim // block.heads, block.reduce.weight.shape[1]
    library.require_tokens((height, width, dim, hidden))
    if not rotates(2 * dim, head_dim):
        raise BackendUnavailableError(f"native kernels: a fused block cannot rotate {2 * dim} in heads of {head_dim}")
    decays, weight, bias, rate, softplus, fixed = 0, 0, 0, 0, False, 0
    made: list[Tensor] = []
    if block.decay is not None:
        logits, scale, softplus = block.decay
        decays = logits.shape[1]
        of_logits = slice(3 * dim, None)
        made.append(block.qkv.weight[of_logits])
        weight = contiguous_address(made[-1], (block.heads * decays, dim))
        made.append(block.qkv.bias[of_logits] + logits.flatten())
        bias = contiguous_address(made[-1], (block.heads * decays,))
        if scale is not None:
            made.append(scale.contiguous())
            rate = contiguous_address(made[-1], scale.shape)
    elif block.log_decay is not None:
        fixed = contiguous_address(block.log_decay, (block.heads,))
    else:
        raise ValueError("fused block: expected learned or constant decays, got neither")
    layers: tuple[tuple[LinearWeights, int, int, slice], ...] = (
        (block.qkv, 3 * dim + block.heads * decays, dim, slice(0, 3 * dim)),
        (block.proj, dim, dim, slice(None)),
        (block.expand, hidden, dim, slice(None)),
        (block.reduce, dim, hidden, slice(None)),
    )
    parameters = _BLOCK.pack(
        height,
        width,
        dim,
        block.heads,
        hidden,
        _depthwise(block.position, dim, 3, 1.0, made),
        _depthwise(block.local, dim, 5, 0.0, made),
        _depthwise(block.mix, hidden, 3, 1.0, made),
        *(address for layer in layers for address in _linear(*layer, made)),
        block.qkv.norm_eps,
        block.expand.norm_eps,
        *(contiguous_address(table, (height * width, head_dim // 2)) for table in block.rotary),
        decays,
        weight,
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
    return parameters, made


def _depthwise(conv: ConvWeights, channels: int, size: int, centre: float, made: list[Tensor]) -> int:
    """Taps, with `centre` added to the middle one, and bias, as packed_depthwise of csrc/depthwise.h takes them."""
    if conv.weight.shape != (channels, 1, size, size) or conv.bias.shape != (channels,):
        raise ValueError(
            f"fused block: expected a weight of {(channels, 1, size, size)} and a bias of {(channels,)}, "
            f"got {tuple(conv.weight.shape)} and {tuple(conv.bias.shape)}"
        )
    taps = conv.weight.flatten(1).mT
    packed = taps.new_zeros(size * size + 1, -(-channels // _LINE) * _LINE)
    packed[:-1, :channels] = taps
    packed[size * size // 2, :channels] += centre
    packed[-1, :channels] = conv.bias
    made.append(packed)
    return contiguous_address(packed, packed.shape)


def _linear(layer: LinearWeights, outputs: int, inputs: int, part: slice, made: list[Tensor]) -> tuple[int, int]:
    """The packed weight and the bias of a part of a layer's outputs."""
    if layer.weight.shape != (outputs, inputs):
        raise ValueError(f"fused block: expected a weight of {(outputs, inputs)}, got {tuple(layer.weight.shape)}")
    bias = layer.bias[part]
    return _packed(layer, part, made), contiguous_address(bias, bias.shape)


def _packed(layer: LinearWeights, part: slice, made: list[Tensor]) -> int:
    form = "" if part == slice(None) else f" {part.start}:{part.stop}"
    made.append(packed_weight(layer.packed, lambda: layer.weight[part], form))  # `layer.packed` may be emptied
    return contiguous_address(made[-1], made[-1].shape)

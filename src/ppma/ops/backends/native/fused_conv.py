"""3x3 convolutions with packed weights for inference: csrc/packed_conv.cpp and csrc/winograd.cpp."""

import struct
from collections.abc import Sequence
from ctypes import c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from ppma.ops.backends.contract import BackendUnavailableError, Conv3x3Weights
from ppma.ops.backends.native import library
from ppma.ops.backends.native.fused_linear import packed_address, panel_floats
from ppma.ops.backends.native.library import Kernel, contiguous_address, view

_PARAMS = struct.Struct("PPP6qii")  # PackedConvParams of csrc/packed_conv.h, behind the view of x
_direct = Kernel("ppma_packed_conv", c_void_p)
_winograd = Kernel("ppma_winograd_conv", c_void_p)

# Of inputs and outputs, for each stride; with fewer channels the transforms of Winograd's algorithm cost more than it
# saves.
_LEAST_CHANNELS = {1: 16, 2: 32}
# G of csrc/winograd.cpp, for each stride.
_SPREAD = {
    1: ((1.0, 0.0, 0.0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0.0, 0.0, 1.0)),
    2: ((1.0, 0.0, 0.0), (1.0, 0.0, 1.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
}


def fused_conv(x: Tensor, weight: Tensor, bias: Tensor, stride: int, gelu: bool, packed: dict[str, Tensor]) -> Tensor:
    """See `ppma.ops.fused_conv.fused_conv`."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, weight, bias)):
        raise BackendUnavailableError("native kernels: fused_conv has no gradient")
    return convolve(x, weight, bias, stride, gelu, packed)


def convolve(x: Tensor, weight: Tensor, bias: Tensor, stride: int, gelu: bool, packed: dict[str, Tensor]) -> Tensor:
    """`fused_conv` of a 3x3 convolution, without a look at gradients."""
    conv = Conv3x3Weights(weight, bias, stride, gelu, packed)
    shape = conv.output_shape(x.shape)
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    kernel = _winograd if uses_winograd(weight, stride) else _direct
    kernel(view(x, x.shape) + conv_parameters(x.shape, conv, contiguous_address(out, shape)))
    return out


def conv_parameters(shape: Sequence[int], conv: Conv3x3Weights, out: int) -> bytes:
    """What follows the view of x, (B, H, W, inputs), in `PackedConvParams`; `out` is the address of a result."""
    weight, stride = conv.weight, conv.stride
    outputs, inputs = weight.shape[:2]
    batch, height, width, channels = shape
    if weight.shape[2:] != (3, 3) or stride not in (1, 2):
        raise BackendUnavailableError(
            f"native kernels: expected a 3x3 convolution with stride 1 or 2, got {tuple(weight.shape[2:])} and {stride}"
        )
    if channels != inputs:
        raise ValueError(f"native kernels: expected {inputs} channels for a convolution, got {channels}")
    library.require_tokens((height, width, inputs, outputs))
    if uses_winograd(weight, stride):
        matrix = packed_address(conv.packed, lambda: _spread(weight, stride), f" winograd {stride}")
    else:
        matrix = packed_address(conv.packed, lambda: weight.permute(0, 2, 3, 1).flatten(1))
    return _PARAMS.pack(
        matrix,
        contiguous_address(conv.bias, (outputs,)),
        out,
        batch,
        height,
        width,
        inputs,
        outputs,
        stride,
        conv.gelu,
        library.threads(),
    )


def uses_winograd(weight: Tensor, stride: int) -> bool:
    """Whether the convolution runs by Winograd's algorithm."""
    return stride in _LEAST_CHANNELS and min(weight.shape[:2]) >= _LEAST_CHANNELS[stride]


def _spread(weight: Tensor, stride: int) -> Tensor:
    """G g G^T of each 3x3 kernel g: 16 matrices of outputs, as many as fill whole panels, times inputs; one matrix."""
    spread = torch.tensor(_SPREAD[stride], dtype=torch.float64, device=weight.device)
    places = torch.kron(spread, spread) @ weight.reshape(-1, 9).double().mT
    places = places.float().unflatten(1, weight.shape[:2])
    missing = -len(weight) % panel_floats()
    return F.pad(places, (0, 0, 0, missing)).flatten(0, 1)

"""3x3 convolutions with packed weights for inference: csrc/packed_conv.cpp."""

import struct
from ctypes import c_void_p

import torch
from torch import Tensor

from ppma.ops.backends.contract import BackendUnavailableError
from ppma.ops.backends.native import library
from ppma.ops.backends.native.fused_linear import packed_address
from ppma.ops.backends.native.library import Kernel, contiguous_address, view

_PARAMS = struct.Struct("PPP6qii")  # PackedConvParams of csrc/packed_conv.h, behind the view of x
_kernel = Kernel("ppma_packed_conv", c_void_p)


def fused_conv(x: Tensor, weight: Tensor, bias: Tensor, stride: int, gelu: bool, packed: dict[str, Tensor]) -> Tensor:
    """See `ppma.ops.fused_conv.fused_conv`."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, weight, bias)):
        raise BackendUnavailableError("native kernels: fused_conv has no gradient")
    if weight.shape[2:] != (3, 3) or stride not in (1, 2):
        raise BackendUnavailableError(
            f"native kernels: expected a 3x3 convolution with stride 1 or 2, got {tuple(weight.shape[2:])} and {stride}"
        )
    outputs, inputs = weight.shape[:2]
    batch, height, width, _ = x.shape
    library.require_tokens((height, width, inputs, outputs))
    out = torch.empty((batch, -(-height // stride), -(-width // stride), outputs), dtype=torch.float32, device=x.device)
    params = _PARAMS.pack(
        packed_address(weight.permute(0, 2, 3, 1).flatten(1), packed),
        contiguous_address(bias, (outputs,)),
        contiguous_address(out, out.shape),
        batch,
        height,
        width,
        inputs,
        outputs,
        stride,
        gelu,
        library.threads(),
    )
    _kernel(view(x, (batch, height, width, inputs)) + params)
    return out

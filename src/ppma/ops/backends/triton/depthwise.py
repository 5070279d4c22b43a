"""Channel-last depthwise convolution with GELU before and a sum after it: one launch each way."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ppma.ops.backends.contract import BackendUnavailableError
from ppma.ops.backends.triton.depthwise_kernels import depthwise_backward, depthwise_forward
from ppma.ops.backends.triton.launch import Config, cdiv, launch
from ppma.ops.backends.triton.tiles import field
from ppma.ops.layout import autocast_dtype

KERNEL_SIZES = (3, 5)
CONFIGS = [Config(warps=4)]

# Grid rows of a program: few enough to occupy a GPU, many against the rows around them, which are read again.
MOST_ROWS = 16
MOST_CHANNELS = 64
# Numbers of a tile. With 25 taps a thread has room for two.
TILE = {3: 512, 5: 256}


def _band(height: int) -> int:
    """Rows of a band: as many for each."""
    return cdiv(height, cdiv(height, MOST_ROWS))


def _bands(x: Tensor) -> int:
    """Of all images."""
    return x.shape[0] * cdiv(x.shape[1], _band(x.shape[1]))


def _launch(kernel: Any, x: Tensor, size: int, **arguments: Any) -> None:
    """Run a kernel on x (B, H, W, C) with a program for each band of rows and block of channels.

    The forward kernel has one for each strip of columns too; the other sums over them.
    """
    _, height, width, channels = x.shape
    block = max(16, min(MOST_CHANNELS, channels & -channels))
    strips = cdiv(width, TILE[size] // block) if kernel is depthwise_forward else 1
    launch(
        kernel,
        (_bands(x) * strips * cdiv(channels, block),),
        CONFIGS,
        x=field(x.unsqueeze(1)),
        H=height,
        W=width,
        channels=channels,
        band=_band(height),
        K=size,
        BLOCK_W=TILE[size] // block,
        BLOCK_C=block,
        WHOLE=channels % block == 0,
        **arguments,
    )


class _Convolution(torch.autograd.Function):
    """Saves its input alone: activations and products are recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        gelu: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        weight = weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.gelu = gelu
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (weight, bias, residual)]
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        _launch(
            depthwise_forward,
            x,
            weight.shape[-1],
            weight=weight,
            bias=None if bias is None else bias.contiguous(),
            residual=None if residual is None else field(residual.unsqueeze(1)),
            out=field(out.unsqueeze(1)),
            GELU=gelu,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_weight, of_bias, of_residual = ctx.dtypes
        size, channels = weight.shape[-1], x.shape[-1]
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        sums = torch.empty((_bands(x), size * size + 1, channels), dtype=torch.float32, device=x.device)
        _launch(
            depthwise_backward,
            x,
            size,
            grad=field(grad.unsqueeze(1)),
            weight=weight,
            grad_x=field(grad_x.unsqueeze(1)),
            sums=sums,
            OWN=of_residual is None,
            GELU=ctx.gelu,
        )
        total = sums.sum(0)
        grad_weight = total[:-1].mT.reshape(weight.shape).to(of_weight)
        grad_bias = None if of_bias is None else total[-1].to(of_bias)
        return grad_x, grad_weight, grad_bias, None if of_residual is None else grad.to(of_residual), None, None


def depthwise_conv(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gelu: bool) -> Tensor:
    """See `ppma.ops.depthwise.depthwise_conv`. Under autocast the result has the dtype that PyTorch's would have."""
    if weight.shape[-1] not in KERNEL_SIZES:
        raise BackendUnavailableError(
            f"Triton kernels: expected a depthwise kernel of size 3 or 5, got {weight.shape[-1]}"
        )
    dtype = x.dtype if residual is None else residual.dtype
    return _Convolution.apply(
        x, weight, bias, residual, gelu, torch.promote_types(dtype, autocast_dtype(x.device) or x.dtype)
    )

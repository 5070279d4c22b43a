"""Layer norm that keeps to half precision under autocast."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppma.ops.layout import autocast_dtype

_HALF = (torch.float16, torch.bfloat16)


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` without float32 copies under autocast on a GPU.

    There autocast copies half-precision values to float32, normalises them into another float32 tensor, and copies that
    back for the linear layer behind it. Here the values stay in half precision; means and variances are float32 inside
    PyTorch's kernel in any case. As in linear layers under autocast, weights are rounded to the dtype of the values.

    Examples:
        >>> import torch
        >>> from ppma.layers.norm import LayerNorm
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     LayerNorm(4)(torch.ones(2, 4, dtype=torch.bfloat16)).dtype
        torch.bfloat16
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axes of x."""
        if x.device.type != "cuda" or x.dtype not in _HALF or autocast_dtype(x.device) is None:
            return super().forward(x)
        weight, bias = (None if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)

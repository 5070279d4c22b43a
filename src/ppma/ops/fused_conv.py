"""A 3x3 convolution with the activation behind it, for inference on channel-last tensors."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ppma.ops import backends
from ppma.ops.backends import pytorch
from ppma.ops.choice import fastest, rounded_down
from ppma.ops.fused_linear import PACKED, in_float32
from ppma.ops.options import BackendName
from ppma.ops.watching import has_tangent, observed


class ConvShape(NamedTuple):
    """What a choice of implementation depends on.

    Attributes:
        pixels: of all inputs, rounded down to a power of two.
        inputs: channels.
        outputs: channels.
        stride: of the convolution.
        gelu: with an activation.
        threads: of PyTorch.
        dtype: of the tensors.
    """

    pixels: int
    inputs: int
    outputs: int
    stride: int
    gelu: bool
    threads: int
    dtype: torch.dtype


_choices: dict[ConvShape, str] = {}


def choices() -> Mapping[ConvShape, str]:
    """The implementation that this process chose for each shape: "packed" or "torch"."""
    return _choices


def runs_packed(
    shape: Sequence[int], weight: Tensor, bias: Tensor, stride: int, gelu: bool, backend: BackendName
) -> bool:
    """Whether `fused_conv` is known to run the packed kernel, given an x of this shape that kernels serve."""
    if (
        observed(weight, bias)
        or has_tangent((weight, bias))
        or not (weight.dtype == bias.dtype and weight.dtype in backends.NATIVE_DTYPES)
    ):
        return False
    return backend == "native" or (backend == "auto" and _choices.get(_key(shape, weight, stride, gelu)) == PACKED)


def _key(shape: Sequence[int], weight: Tensor, stride: int, gelu: bool) -> ConvShape:
    outputs, inputs = weight.shape[:2]
    pixels = rounded_down(shape[0] * shape[1] * shape[2])
    return ConvShape(pixels, inputs, outputs, stride, gelu, torch.get_num_threads(), weight.dtype)


def fused_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    stride: int = 1,
    gelu: bool = False,
    packed: dict[str, Tensor] | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """`act(conv(x) + bias)`, with a border of one zero, for inference.

    Args:
        x: (B, H, W, inputs), in any strides.
        weight: (outputs, inputs, 3, 3).
        bias: (outputs,).
        stride: 1 or 2.
        gelu: act is GELU instead of the identity.
        packed: belongs to the weight; see `ppma.ops.fused_linear.fused_linear`.
        backend: "native" runs the packed kernel, "torch" PyTorch; "auto" on the CPU the faster one by measurement
            (`choices`). The native kernel has no gradient; where one is needed PyTorch runs.

    Returns:
        (B, H / stride, W / stride, outputs), rounded up.

    Examples:
        >>> import torch
        >>> from ppma.ops.fused_conv import fused_conv
        >>> fused_conv(torch.randn(1, 5, 6, 2), torch.randn(4, 2, 3, 3), torch.zeros(4), stride=2).shape
        torch.Size([1, 3, 3, 4])
    """
    arguments = (x, weight, bias, stride, gelu, {} if packed is None else packed)
    serves = x.dtype in backends.NATIVE_DTYPES and backends.kernels_serve("auto", "fused_conv", *arguments)
    if backend != "auto" or torch.is_grad_enabled() or not serves:
        return backends.compose(backend, "fused_conv", *arguments)
    shape = _key(x.shape, weight, stride, gelu)
    own = partial(backends.compose if x.dtype == torch.float32 else in_float32, "auto", "fused_conv", *arguments)
    chosen = _choices.get(shape)
    if chosen == PACKED:
        return own()
    candidates: dict[str, Callable[[], Tensor]] = {
        PACKED: own,
        "torch": partial(pytorch.fused_conv, *arguments),
    }
    if chosen is None:
        chosen = _choices[shape] = fastest(candidates)
    return candidates[chosen]()

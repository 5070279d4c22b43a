"""A linear layer together with what stands around it in a block: layer norm, residual, rotary embeddings.

The first call with a shape measures the implementations, and the process keeps the fastest (`ppma.ops.choice`).
"""

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ppma.ops import backends
from ppma.ops.backends import pytorch
from ppma.ops.choice import fastest, rounded_down
from ppma.ops.options import BackendName

PACKED = "packed"  # the native kernel


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def products(dtype: torch.dtype = torch.float32) -> dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]]:
    """The libraries' products `x weight^T + bias`, by name; "torch" is MKL in PyTorch's builds for x86."""
    found: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {"torch": F.linear}
    if _onednn_multiplies(dtype):
        found["onednn"] = _onednn
    return found


@functools.cache
def _onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and has a product for this dtype: on CPUs with AVX2 alone it has none for bfloat16."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    try:
        _onednn(torch.ones(2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype), torch.ones(2, dtype=dtype))
    except RuntimeError:
        return False
    return True


def in_float32(name: str, operator: str, x: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    """The packed product of half-precision tensors; the widened weight is kept with the packed one."""
    *others, packed = arguments
    wide = (value.float() if isinstance(value, Tensor) else value for value in others)
    return backends.compose(name, operator, x.float(), widened(weight, packed), *wide, packed).to(x.dtype)


def widened(weight: Tensor, packed: dict[str, Tensor]) -> Tensor:
    """The weight in float32, which is kept with what is packed of it."""
    if weight.dtype == torch.float32:
        return weight
    if "float32" not in packed:
        packed["float32"] = weight.float()
    return packed["float32"]


class Shape(NamedTuple):
    """What a choice of implementation depends on.

    Attributes:
        rows: of the input, rounded down to a power of two.
        inputs: channels.
        outputs: channels.
        norm: with a layer norm.
        residual: with a residual.
        rotary: with rotary embeddings.
        threads: of PyTorch.
        dtype: of the tensors.
    """

    rows: int
    inputs: int
    outputs: int
    norm: bool
    residual: bool
    rotary: bool
    threads: int
    dtype: torch.dtype


_choices: dict[Shape, str] = {}


def choices() -> Mapping[Shape, str]:
    """The implementation that this process chose for each shape: "packed", "torch" or "onednn"."""
    return _choices


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    *,
    norm_eps: float | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    rotated: int = 0,
    packed: dict[str, Tensor] | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """`residual + rotate(linear(normalise(x)))`, for inference.

    Args:
        x: (rows, inputs).
        weight: (outputs, inputs), with the norm's scale multiplied in.
        bias: (outputs,), with the weighted norm's shift added.
        residual: (rows, outputs), or None.
        norm_eps: epsilon of a layer norm of x without scale and shift, None for no norm.
        rotary: cosines and sines, (tokens, head_dim / 2), as in `rotary_split`; row r of x is token r % tokens.
        rotated: the first `rotated` outputs, a multiple of head_dim, are rotated.
        packed: belongs to the weight; the native backend keeps its packed copies here, and packs in every call without
            it. Empty it when the weight changes.
        backend: "native" runs the packed kernel, "torch" PyTorch; "auto" on the CPU the fastest by measurement
            (`choices`), so results of two processes may differ by rounding. The native kernel has no gradient; where
            one is needed PyTorch runs.

    Returns:
        (rows, outputs).

    Examples:
        >>> import torch
        >>> from ppma.ops.fused_linear import fused_linear
        >>> x = torch.randn(6, 8)
        >>> fused_linear(x, torch.randn(4, 8), torch.zeros(4), norm_eps=1e-6).shape
        torch.Size([6, 4])
    """
    arguments = (x, weight, bias, residual, norm_eps, rotary, rotated, {} if packed is None else packed)
    if backend != "auto" or torch.is_grad_enabled() or not backends.kernels_serve("auto", "fused_linear", *arguments):
        return backends.compose(backend, "fused_linear", *arguments)
    shape = Shape(
        rows=rounded_down(len(x)),
        inputs=weight.shape[1],
        outputs=weight.shape[0],
        norm=norm_eps is not None,
        residual=residual is not None,
        rotary=rotary is not None,
        threads=torch.get_num_threads(),
        dtype=x.dtype,
    )
    own = partial(backends.compose if x.dtype == torch.float32 else in_float32, "auto", "fused_linear", *arguments)
    chosen = _choices.get(shape)
    if chosen == PACKED:
        return own()
    candidates: dict[str, Callable[[], Tensor]] = {PACKED: own}
    for name, product in products(x.dtype).items():
        candidates[name] = partial(pytorch.fused_linear, *arguments, product=product)
    if chosen is None:
        chosen = _choices[shape] = fastest(candidates)
    return candidates[chosen]()

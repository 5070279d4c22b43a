"""A linear layer together with what stands around it in a block: layer norm, residual, rotary embeddings."""

from torch import Tensor

from ppma.ops import backends
from ppma.ops.options import BackendName


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
        backend: selects the implementation. The native kernel has no gradient; where one is needed PyTorch runs.

    Returns:
        (rows, outputs).

    Examples:
        >>> import torch
        >>> from ppma.ops.fused_linear import fused_linear
        >>> x = torch.randn(6, 8)
        >>> fused_linear(x, torch.randn(4, 8), torch.zeros(4), norm_eps=1e-6).shape
        torch.Size([6, 4])
    """
    return backends.compose(
        backend, "fused_linear", x, weight, bias, residual, norm_eps, rotary, rotated, {} if packed is None else packed
    )

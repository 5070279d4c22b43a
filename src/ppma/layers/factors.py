"""Attention weights of low rank, S1 S2, in place of a softmax: O(N) with a polyline mask.

Each row of S1 S2 sums to 1, as those of a softmax do. Both factors are computed in float32 at least.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ppma.ops.layout import compute_dtype
from ppma.ops.padding import softmax, zero_invalid


def linear_factors(q: Tensor, k: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Linear attention with the feature map elu + 1 (Katharopoulos et al., 2020), divided by the sum of its weights.

    Args:
        q: (B, heads, H, W, d).
        k: (B, heads, H, W, d).
        valid: boolean (B, H, W), False at tokens that take no part as keys; all do if None.

    Returns:
        S1 and S2, (B, heads, H, W, d) in the dtype of q.

    Examples:
        >>> import torch
        >>> s1, s2 = linear_factors(*torch.randn(2, 1, 4, 6, 5, 8))
        >>> weights = s1.flatten(2, 3) @ s2.flatten(2, 3).mT
        >>> torch.allclose(weights.sum(-1), torch.ones(30))
        True
    """
    dtype = compute_dtype(q.dtype)
    s1, s2 = (F.elu(tensor.to(dtype)) + 1 for tensor in (q, k))
    s2 = zero_invalid(s2, valid)
    # The mean and a root of N on either side instead of the sum: float16 has no room for 1 / N.
    tokens = q.shape[-3] * q.shape[-2]
    total = (s1 * s2.mean((-3, -2), keepdim=True)).sum(-1, keepdim=True)
    s1 = s1 / total.masked_fill(total == 0, 1.0)
    return (s1 * tokens**-0.5).to(q.dtype), (s2 * tokens**-0.5).to(q.dtype)


def softmax_factors(q: Tensor, k: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Efficient attention (Shen et al., 2021): a softmax of q over its channels, one of k over the tokens.

    Arguments and result as in `linear_factors`.

    Examples:
        >>> import torch
        >>> s1, s2 = softmax_factors(*torch.randn(2, 1, 4, 6, 5, 8))
        >>> weights = s1.flatten(2, 3) @ s2.flatten(2, 3).mT
        >>> torch.allclose(weights.sum(-1), torch.ones(30))
        True
    """
    dtype, grid = compute_dtype(q.dtype), k.shape[-3:-1]
    logits = k.to(dtype)
    if valid is not None:
        logits = logits.masked_fill(~valid[..., None, :, :, None], -torch.inf)
    over_tokens = softmax(logits.flatten(-3, -2).mT, padded=valid is not None)
    s1, s2 = q.to(dtype).softmax(-1), over_tokens.mT.unflatten(-2, grid)
    tokens = grid[0] * grid[1]
    return (s1 * tokens**-0.5).to(q.dtype), (s2 * tokens**0.5).to(q.dtype)


# By the `kind` of an attention.
FACTORS: dict[str, Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]] = {
    "linear": linear_factors,
    "decomposed": softmax_factors,
}

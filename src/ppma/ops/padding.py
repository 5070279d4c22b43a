"""Key padding: tokens that take no part as keys, because images of different sizes share a batch.

`valid` is a boolean (B, H, W), True where the token is real. Invalid keys get the logit -inf and the weight 0; k and v
are replaced by 0 there, so that not even NaN reaches a result. A query without any valid key gets 0.
"""

import torch
from torch import Tensor


def zero_invalid(tensor: Tensor, valid: Tensor | None) -> Tensor:
    """A (B, heads, H, W, channels) with 0 at the invalid tokens; the same tensor if `valid` is None."""
    return tensor if valid is None else tensor.masked_fill(~valid[..., None, :, :, None], 0.0)


def mask_invalid(logits: Tensor, valid: Tensor | None) -> Tensor:
    """Logits (..., queries, keys) with -inf for the invalid keys.

    Args:
        logits: (..., queries, keys).
        valid: (..., keys), broadcastable to the logits without their axis of queries; None leaves them unchanged.
    """
    return logits if valid is None else logits.masked_fill(~valid[..., None, :], -torch.inf)


def softmax(logits: Tensor, padded: bool) -> Tensor:
    """Softmax over the last axis; with `padded`, rows whose logits are all -inf become 0 and have zero gradients."""
    if not padded:
        return logits.softmax(-1)
    empty = logits.amax(-1, keepdim=True) == -torch.inf
    return logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)

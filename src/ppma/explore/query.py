"""Mask and attention weights of one query token.

Attention is linear in v, so the weights of a query are the gradient of its output with respect to v, computed by the
operator that the model runs. This holds for every mask, for both ways to combine it with the softmax, and for
criss-cross attention, whose N x N map is never built.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from ppma import masks
from ppma.explore.capture import AttentionRecord
from ppma.layers.attention import FORMULATIONS, attend
from ppma.masks import PolylineMask, PrefixedMask, ScanMask, StructuredMask
from ppma.ops import checks
from ppma.ops.layout import compute_dtype

RMT_SPAN = 4.0  # spread of RMT's fixed decays over the heads in the first stages


def decays(mask: StructuredMask) -> tuple[Tensor, Tensor]:
    """The log-decays of a mask: horizontal (or of the first scan) and vertical (or of the second)."""
    if isinstance(mask, PrefixedMask):
        return decays(mask.mask)
    if isinstance(mask, ScanMask):
        return mask.log_decays[0], mask.log_decays[1]
    assert isinstance(mask, PolylineMask)
    return mask.log_alpha, mask.log_beta


def with_decays(mask: StructuredMask, log_alpha: Tensor, log_beta: Tensor) -> StructuredMask:
    """The same kind of mask with other log-decays."""
    if isinstance(mask, PrefixedMask):
        return PrefixedMask(with_decays(mask.mask, log_alpha, log_beta), mask.prefix, mask.grid)
    if isinstance(mask, ScanMask):
        return ScanMask([log_alpha, log_beta], mask.orders)
    assert isinstance(mask, PolylineMask)
    return PolylineMask(log_alpha, log_beta, mask.operator_paths)


def map_decays(mask: StructuredMask, change: Callable[[Tensor], Tensor]) -> StructuredMask:
    """The same mask with a function applied to its log-decays."""
    log_alpha, log_beta = decays(mask)
    return with_decays(mask, change(log_alpha), change(log_beta))


def check_query(query: tuple[int, int], grid: tuple[int, int]) -> None:
    """Raise a ValueError unless the query is a pair of integers on the grid."""
    whole = len(query) == 2 and all(isinstance(part, Integral) and not isinstance(part, bool) for part in query)
    if not (whole and 0 <= query[0] < grid[0] and 0 <= query[1] < grid[1]):
        raise ValueError(
            f"query: expected a token of the {grid[0]} x {grid[1]} grid (row and column from 0), got {query}"
        )


def query_weights(record: AttentionRecord, query: tuple[int, int]) -> Tensor:
    """The attention weights of one query, mask included.

    Args:
        record: from `capture`.
        query: (i, j).

    Returns:
        (B, heads, H, W): the query's row of the N x N map, without prefix tokens.

    Examples:
        >>> import timm, torch
        >>> from ppma.explore import capture_image, query_weights
        >>> records = capture_image(timm.create_model("ppma_nano"), torch.randn(3, 32, 32))
        >>> query_weights(records[0], (3, 5)).shape
        torch.Size([1, 2, 16, 16])
    """
    check_query(query, record.grid)
    H, W = record.grid
    token = record.prefix + query[0] * W + query[1]
    with torch.inference_mode(False), torch.enable_grad():
        # Clones: tensors captured in inference mode cannot take part in autograd.
        q, k = (t.detach().clone().to(compute_dtype(t.dtype)) for t in (record.q, record.k))
        mask = map_decays(record.mask, lambda decay: decay.detach().clone())
        v = q.new_zeros((*q.shape[:-1], 1), requires_grad=True)
        out = attend(record.kind, mask, q, k, v, combine=record.combine).flatten(2, 3)
        (row,) = torch.autograd.grad(out[:, :, token].sum(), v)
    return row.flatten(2)[..., record.prefix :].unflatten(-1, (H, W))


def query_mask(record: AttentionRecord, query: tuple[int, int]) -> Tensor:
    """The mask's weights for one query: the mean over its paths, 1 at the query itself.

    With equal scores the softmax is uniform, and the attention weights are the mask up to a factor. In criss-cross
    attention this is the product of the row and column masks: for polyline masks the same as in full attention
    (Theorem 1), for scan masks what criss-cross attention applies.

    Args:
        record: from `capture`.
        query: (i, j).

    Returns:
        (B, heads, H, W).
    """
    flat = torch.zeros_like(record.q)
    equal = dataclasses.replace(record, q=flat, k=flat, combine="hadamard")
    tokens = record.prefix + record.grid[0] * record.grid[1]
    return query_weights(equal, query) * (tokens / len(record.mask.paths))


def unmasked(record: AttentionRecord) -> AttentionRecord:
    """The same attention with all decays set to 1."""
    return dataclasses.replace(record, mask=map_decays(record.mask, torch.zeros_like))


def query_attention(record: AttentionRecord, query: tuple[int, int]) -> Tensor:
    """The query's attention as shares: without a mask they sum to 1, whatever the number of paths.

    Args:
        record: of an attention.
        query: (i, j).

    Returns:
        (B, heads, H, W).
    """
    summed = len(record.mask.paths) if record.combine == "hadamard" else 1
    return query_weights(record, query) / summed


@dataclass(frozen=True)
class QueryPanels:
    """Decays, mask and attention for one query of one image, each (H, W).

    Attributes:
        alpha: horizontal decays; NaN in the first column, whose edges lie outside the grid.
        beta: vertical decays; NaN in the first row.
        mask: mask weight of each key.
        attention: attention weights without the mask.
        masked_attention: attention weights with the mask.
    """

    alpha: Tensor
    beta: Tensor
    mask: Tensor
    attention: Tensor
    masked_attention: Tensor


def query_panels(
    record: AttentionRecord, query: tuple[int, int], *, head: int | None = None, image: int = 0
) -> QueryPanels:
    """Decays, mask and attention for one query.

    Args:
        record: from `capture`.
        query: (i, j).
        head: 0-based; None for the mean over the heads.
        image: index in the batch.

    Examples:
        >>> import timm, torch
        >>> from ppma.explore import capture_image, query_panels
        >>> records = capture_image(timm.create_model("ppma_nano"), torch.randn(3, 32, 32))
        >>> panels = query_panels(records[0], (3, 5), head=1)
        >>> panels.mask.shape, round(panels.mask[3, 5].item(), 4)
        (torch.Size([16, 16]), 1.0)
    """
    if head is not None and not 0 <= head < record.heads:
        raise ValueError(f"head: expected 0 to {record.heads - 1} in {record.name}, got {head}")

    def pick(values: Tensor) -> Tensor:
        of_image = values.expand(record.q.shape[0], record.heads, *record.grid)[image]
        return (of_image.mean(0) if head is None else of_image[head]).detach().cpu()

    alpha, beta = (pick(decay.exp()) for decay in decays(record.mask))
    if not isinstance(record.mask, ScanMask):
        alpha, beta = alpha.clone(), beta.clone()
        alpha[:, 0] = beta[0, :] = torch.nan
    return QueryPanels(
        alpha=alpha,
        beta=beta,
        mask=pick(query_mask(record, query)),
        attention=pick(query_attention(unmasked(record), query)),
        masked_attention=pick(query_attention(record, query)),
    )


@dataclass(frozen=True)
class WhatIf:
    """A counterfactual change of one attention layer; earlier layers are unchanged.

    Attributes:
        mask: a mask of `ppma.masks.KINDS` built from the same decays ("shared" uses alpha for both); None for the
            model's own.
        formulation: "paper" or "release", how mask and softmax are combined; None for the model's own.
        log_decays: log_alpha and log_beta, (H, W) each, to use instead of the model's; None for the model's own.
        strength: factor on the log-decays: 0 removes the mask, above 1 weights decay faster.

    Examples:
        >>> import timm, torch
        >>> from ppma.explore import WhatIf, capture_image
        >>> record = capture_image(timm.create_model("ppma_nano"), torch.randn(3, 32, 32))[0]
        >>> WhatIf(formulation="release")(record).combine
        'logit'
    """

    mask: str | None = None
    formulation: str | None = None
    log_decays: tuple[Tensor, Tensor] | None = None
    strength: float = 1.0

    def __post_init__(self) -> None:
        if self.mask is not None:
            checks.one_of("mask", self.mask, masks.KINDS)
        if self.formulation is not None:
            checks.one_of("formulation", self.formulation, FORMULATIONS)
        if not 0 <= self.strength < float("inf"):
            raise ValueError(f"strength: expected a number >= 0, got {self.strength}")

    def __call__(self, record: AttentionRecord) -> AttentionRecord:
        """Apply the change to a record."""
        mask = record.mask
        if self.log_decays is not None:
            mask = with_decays(mask, *(decay.expand(decays(mask)[0].shape) for decay in self.log_decays))
        if self.mask is not None:
            mask = _other_mask(record, decays(mask), self.mask)
        if self.strength == 0:
            mask = map_decays(mask, torch.zeros_like)  # 0 * -inf would be NaN
        elif self.strength != 1:
            mask = map_decays(mask, lambda decay: decay * self.strength)
        combine = record.combine if self.formulation is None else FORMULATIONS[self.formulation].combine
        return dataclasses.replace(record, mask=mask, combine=combine)


def _other_mask(record: AttentionRecord, log_decays: tuple[Tensor, Tensor], kind: str) -> StructuredMask:
    build = masks.KINDS[kind].build
    if build is not None:
        log_alpha, log_beta = log_decays
        mask: StructuredMask = build(log_alpha, log_alpha if kind == "shared" else log_beta)
    elif kind == "none":
        mask = masks.none(record.grid, device=record.q.device)
    else:
        mask = masks.rmt(masks.rmt_log_decay(record.heads, RMT_SPAN).to(record.q.device), record.grid)
    return PrefixedMask(mask, record.prefix, record.grid) if record.prefix else mask

"""Full attention with the mask: fused forward and backward, nothing of size N x N, no atomics."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppma.ops.backends.contract import BackendUnavailableError
from ppma.ops.backends.triton.attention_backward_kernels import attention_backward
from ppma.ops.backends.triton.attention_kernels import attention_forward
from ppma.ops.backends.triton.configs import Tile, attention_configs, attention_tile
from ppma.ops.backends.triton.launch import cdiv, check_channels, launch, padded, precision
from ppma.ops.backends.triton.potentials import Slots, gradients, potentials, tables
from ppma.ops.backends.triton.tiles import field, padding_plane, plane
from ppma.ops.layout import heads_last_empty
from ppma.ops.options import AttentionOptions, Paths


class Mask(NamedTuple):
    """Where kernels read the mask.

    Attributes:
        alpha: decay matrices of the rows, (B, heads, H, W, padded W), or potentials along them, (1, B, heads, H, W).
        beta: the same of the columns, (B, heads, H, H, padded W) or (1, B, heads, H, W).
        tables: which of the two.
    """

    alpha: Tensor
    beta: Tensor
    tables: bool


def _tile(like: Tensor, dv: int, band: int | None) -> Tile:
    return attention_tile(like.shape[2], like.shape[3], band, like.dtype, padded(max(like.shape[-1], dv)))


def make_mask(q: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mode: str) -> Mask:
    """Tables for softmax attentions, whose O(N^2) work they relieve of exponentials, unless they would be too large."""
    found = None if mode == "linear" else tables(log_alpha, log_beta, mode, _tile(q, v.shape[-1], None).cols)
    if found is not None:
        return Mask(*found, tables=True)
    return Mask(*potentials(log_alpha, log_beta, mode), tables=False)


def _launch(
    kernel: Any,
    kind: str,
    like: Tensor,
    dv: int,
    mask: Mask,
    valid: Tensor | None,
    mode: str,
    band: int | None,
    **arguments: Any,
) -> None:
    """Run a kernel with one program for each tile of tokens of each head."""
    batch, heads, height, width, d = like.shape
    tile = _tile(like, dv, band)
    configs = attention_configs(kind, like.dtype, tile, padded(max(d, dv)))
    launch(
        kernel,
        (batch * heads * cdiv(height, tile.rows) * cdiv(width, tile.cols),),
        configs,
        alpha=None if mask.tables else plane(mask.alpha),
        beta=None if mask.tables else plane(mask.beta),
        row_table=mask.alpha if mask.tables else None,
        column_table=mask.beta if mask.tables else None,
        octets=cdiv(width, tile.cols) * tile.cols // 8,
        heads=heads,
        H=height,
        W=width,
        band=band or height,
        MODE=mode,
        TABLES=mask.tables,
        valid=None if valid is None else padding_plane(valid, heads),
        # Tiles reach beyond most grids. Padded queries have no weight; tables of a log mask have no decay for padding.
        CHECK=not mask.tables or valid is not None or (kind != "keys" and mode != "logit"),
        ROWS=tile.rows,
        COLS=tile.cols,
        OTHER_COLS=tile.cols,
        D=d,
        DV=dv,
        BLOCK_D=padded(d),
        BLOCK_DV=padded(dv),
        PRECISION=precision(like),
        **arguments,
    )


def masked_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    out: Tensor,
    stats: Tensor | None,
    first: Tensor | None,
    mode: str,
    paths: Paths | None,
    scale: float,
    band: int | None = None,
    valid: Tensor | None = None,
) -> None:
    """One of the kernel's modes.

    Args:
        q: (B, heads, H, W, d).
        k: (B, heads, H, W, d).
        v: (B, heads, H, W, dv).
        mask: of `make_mask`.
        out: receives the output, (B, heads, H, W, dv).
        stats: receives the largest logit and the sum of each softmax, (2 * softmaxes, B, heads, H, W); None for
            "linear" and where no gradient is needed.
        first: receives the output of the first of two softmaxes, (B, heads, H, W, dv); else None.
        mode: "hadamard", "logit" or "linear".
        paths: "v2h", "h2v" or "2d"; None for no mask, to measure what it costs.
        scale: factor on the scores, positive for "hadamard".
        band: how many grid rows see each other, counted from the top; None for all.
        valid: (B, H, W), False at keys that take no part; None for all.
    """
    _launch(
        attention_forward,
        "forward",
        q,
        v.shape[-1],
        mask,
        valid,
        mode,
        band,
        q=field(q),
        k=field(k),
        v=field(v),
        out=field(out),
        first=None if first is None else field(first),
        stats=None if stats is None else plane(stats),
        scale=scale,
        V2H=paths in ("v2h", "2d"),
        H2V=paths in ("h2v", "2d"),
    )


def potential_slots(q: Tensor, v: Tensor, paths: Paths, band: int | None) -> int:
    """How many slots `masked_backward` takes for what the potentials along one axis receive.

    A path is near from one side, which takes a slot for the fixed token and one for each tile across for the corners of
    the paths along the rows (along the columns only those for the corners), and far from the other side, which takes
    one along the columns: the same number for both axes.
    """
    return (2 if paths == "2d" else 1) * (1 + cdiv(q.shape[3], _tile(q, v.shape[-1], band).cols))


def masked_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    out: Tensor | None,
    stats: Tensor | None,
    first: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor],
    alpha_slots: Slots | None,
    beta_slots: Slots | None,
    mode: str,
    paths: Paths | None,
    scale: float,
    band: int | None = None,
    valid: Tensor | None = None,
) -> None:
    """Gradients of `masked_forward`: one launch for the queries' side, one for the keys'.

    Arguments are those of `masked_forward`. `grad` is the gradient of the output, (B, heads, H, W, dv); `grads` receive
    the gradients of q, k and v, the slots those of the potentials along the rows and the columns.
    """
    across = cdiv(q.shape[3], _tile(q, v.shape[-1], band).cols)
    v2h, h2v = paths in ("v2h", "2d"), paths in ("h2v", "2d")
    norms = None
    if stats is not None:  # a word for each softmax, and one for the deltas
        norms = plane(torch.empty((len(stats) // 2 + 1, *stats.shape[1:]), dtype=torch.int64, device=stats.device))
    for key_side in (False, True):
        near, far = (h2v, v2h) if key_side else (v2h, h2v)
        _launch(
            attention_backward,
            "keys" if key_side else "queries",
            q,
            v.shape[-1],
            mask,
            valid,
            mode,
            band,
            fixed_a=field(k if key_side else q),
            fixed_b=field(v if key_side else grad),
            other_a=field(q if key_side else k),
            other_b=field(grad if key_side else v),
            out=None if out is None or key_side else field(out),
            first=None if first is None or key_side else field(first),
            stats=None if stats is None else plane(stats),
            norms=norms,
            grad_a=field(grads[1] if key_side else grads[0]),
            grad_b=field(grads[2]) if key_side else None,
            alpha_own=alpha_slots.take(1) if alpha_slots and near else None,
            alpha_corner=alpha_slots.take(across) if alpha_slots and near else None,
            beta_own=beta_slots.take(1) if beta_slots and far else None,
            beta_corner=beta_slots.take(across) if beta_slots and near else None,
            scale=scale,
            NEAR=near,
            FAR=far,
            KEY_SIDE=key_side,
        )


def _positive_scale(q: Tensor, options: AttentionOptions) -> tuple[Tensor, float, float]:
    """Queries, scale and the factor that both were changed by: the kernel takes the largest unscaled score."""
    combine, _, scale, _ = options
    if combine == "logit" or scale > 0:
        return q, scale, 1.0
    factor = -1.0 if scale < 0 else 0.0
    return q * factor, -scale or 1.0, factor


def polyline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    options: AttentionOptions,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward; see `Backend.polyline_attention`. Logits of "hadamard" are saved without their scale."""
    check_channels(q, v)
    q, scale, _ = _positive_scale(q, options)
    out = heads_last_empty(v, v.shape[-1])
    stats = torch.empty((2 * options.softmaxes, *q.shape[:-1]), dtype=torch.float32, device=q.device)
    first = torch.empty((options.softmaxes - 1, *v.shape), dtype=torch.float32, device=v.device)
    mask = make_mask(q, v, log_alpha, log_beta, options.combine)
    kept = (stats, first[0] if len(first) else None) if options.save else (None, None)
    try:
        masked_forward(q, k, v, mask, out, *kept, options.combine, options.paths, scale, valid=valid)
    except BackendUnavailableError as error:
        _refused[_variant(q, v, options)] = str(error)
        raise
    return out, stats, first


# Forward passes that did not compile: what another backend saved in its place is of no use to the backward pass.
_refused: dict[tuple[object, ...], str] = {}


def _variant(q: Tensor, v: Tensor, options: AttentionOptions) -> tuple[object, ...]:
    return q.device, q.dtype, q.shape[-1], v.shape[-1], options.combine, options.paths


def polyline_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    out: Tensor,
    stats: Tensor,
    first: Tensor,
    options: AttentionOptions,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_alpha and log_beta."""
    check_channels(q, v)
    if reason := _refused.get(_variant(q, v, options)):
        raise BackendUnavailableError(reason)
    q, scale, factor = _positive_scale(q, options)
    grads = heads_last_empty(q, q.shape[-1]), heads_last_empty(k, k.shape[-1]), heads_last_empty(v, v.shape[-1])
    mask = make_mask(q, v, log_alpha, log_beta, options.combine)
    slots = potential_slots(q, v, options.paths, None)
    alpha_slots, beta_slots = Slots(slots, log_alpha), Slots(slots, log_beta)
    masked_backward(
        grad, q, k, v, mask, out, stats, first[0] if len(first) else None, grads, alpha_slots, beta_slots,
        options.combine, options.paths, scale, valid=valid,
    )  # fmt: skip
    if factor != 1.0:
        grads[0].mul_(factor)
    return *grads, *gradients(alpha_slots.buffer, beta_slots.buffer, log_alpha.dtype)

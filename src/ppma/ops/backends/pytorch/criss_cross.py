"""Criss-cross attention with the mask: masked attention within columns and within rows, chained; O(N^1.5)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ppma.ops.decay_matrix import log_decay_gradient, log_decay_matrix
from ppma.ops.layout import compute_dtype, heads_last_empty
from ppma.ops.options import AttentionOptions, Combine, split_paths
from ppma.ops.padding import mask_invalid, softmax, zero_invalid


@dataclass
class _LineAttention:
    """The masked attention maps of all lines along the second-last axis of q and k.

    Attributes:
        q: (B, heads, lines, n, d).
        k: (B, heads, lines, n, d).
        scale: factor on the scores.
        softmax: (B, heads, lines, n, n), of the scores ("hadamard") or of scores plus log mask ("logit").
        mask: (B, heads, lines, n, n); None for "logit".
        weights: (B, heads, lines, n, n), what multiplies v.
    """

    q: Tensor
    k: Tensor
    scale: float
    softmax: Tensor
    mask: Tensor | None
    weights: Tensor

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, log_decay: Tensor, combine: Combine, scale: float, valid: Tensor | None
    ) -> "_LineAttention":
        """`valid` is (B, lines, n)."""
        scores = mask_invalid((q @ k.mT).mul_(scale), None if valid is None else valid[:, None])
        log_mask = log_decay_matrix(log_decay)
        if combine == "logit":
            weights = softmax(scores.add_(log_mask.to(q.dtype)), padded=valid is not None)
            return cls(q, k, scale, weights, None, weights)
        weights, mask = softmax(scores, padded=valid is not None), log_mask.exp_().to(q.dtype)
        return cls(q, k, scale, weights, mask, weights * mask)

    def backward(self, grad_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and the log-decay."""
        grad_softmax = grad_weights if self.mask is None else grad_weights * self.mask
        weighted = self.softmax * grad_softmax
        grad_scores = weighted - self.softmax * weighted.sum(-1, keepdim=True)
        # "hadamard": d log mask = softmax * mask * G; "logit": the log mask is added to the score.
        grad_log_mask = grad_scores if self.mask is None else weighted
        return (
            (grad_scores @ self.k).mul_(self.scale),
            (grad_scores.mT @ self.q).mul_(self.scale),
            log_decay_gradient(grad_log_mask),
        )


def _columns(x: Tensor) -> Tensor:
    """(B, heads, H, W, c) <-> (B, heads, W, H, c)."""
    return x.transpose(2, 3)


def _maps(
    q: Tensor, k: Tensor, log_alpha: Tensor, log_beta: Tensor, options: AttentionOptions, valid: Tensor | None
) -> tuple[_LineAttention, _LineAttention]:
    dtype, how = compute_dtype(q.dtype), (options.combine, options.scale)
    q, k = q.to(dtype), zero_invalid(k, valid).to(dtype)
    rows = _LineAttention.of(q, k, log_alpha, *how, valid)
    return rows, _LineAttention.of(_columns(q), _columns(k), log_beta.mT, *how, None if valid is None else valid.mT)


def criss_cross_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    options: AttentionOptions,
    valid: Tensor | None = None,
) -> Tensor:
    """q, k (B, heads, H, W, d), v (B, heads, H, W, dv), log-decays (B, heads, H, W) -> (B, heads, H, W, dv)."""
    rows, columns = _maps(q, k, log_alpha, log_beta, options, valid)
    values = zero_invalid(v, valid).to(rows.q.dtype)
    total = torch.zeros((), dtype=values.dtype, device=v.device)
    for path in split_paths(options.paths):
        if path == "v2h":
            total = total + rows.weights @ _columns(columns.weights @ _columns(values))
        else:
            total = total + _columns(columns.weights @ _columns(rows.weights @ values))
    return heads_last_empty(v, v.shape[-1]).copy_(total * options.path_weight)


def criss_cross_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    options: AttentionOptions,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_alpha, log_beta, recomputing the line maps."""
    rows, columns = _maps(q, k, log_alpha, log_beta, options, valid)
    dtype = rows.q.dtype
    values, grad_out = zero_invalid(v, valid).to(dtype), grad.to(dtype) * options.path_weight
    grad_rows, grad_columns = torch.zeros_like(rows.weights), torch.zeros_like(columns.weights)
    grad_values = torch.zeros_like(values, memory_format=torch.contiguous_format)
    for path in split_paths(options.paths):
        if path == "v2h":  # out = rows (columns v)
            inner = columns.weights @ _columns(values)
            grad_rows += grad_out @ _columns(inner).mT
            grad_inner = _columns(rows.weights.mT @ grad_out)
            grad_columns += grad_inner @ _columns(values).mT
            grad_values += _columns(columns.weights.mT @ grad_inner)
        else:  # out = columns (rows v)
            inner = rows.weights @ values
            grad_columns += _columns(grad_out) @ _columns(inner).mT
            grad_inner = _columns(columns.weights.mT @ _columns(grad_out))
            grad_rows += grad_inner @ values.mT
            grad_values += rows.weights.mT @ grad_inner
    row_q, row_k, grad_alpha = rows.backward(grad_rows)
    column_q, column_k, grad_beta = columns.backward(grad_columns)
    return (
        heads_last_empty(q, q.shape[-1]).copy_(row_q.add_(_columns(column_q))),
        heads_last_empty(k, k.shape[-1]).copy_(row_k.add_(_columns(column_k))),
        heads_last_empty(v, v.shape[-1]).copy_(grad_values),
        grad_alpha.to(log_alpha.dtype),
        grad_beta.mT.to(log_beta.dtype).contiguous(),
    )

"""Full attention with the mask, by tiles of query rows: no N x N tensor for a large grid, recomputed in backward.

For query rows I the V2H mask is `rows[i, j, l] * columns[i, k, l]` and the H2V mask `rows[k, j, l] * columns[i, k, j]`:
both are broadcast products of the line matrices, which take O(N^1.5) memory for the whole grid.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ppma.ops.decay_matrix import log_decay_gradient, log_decay_matrix
from ppma.ops.layout import compute_dtype, heads_last_empty
from ppma.ops.options import AttentionOptions, split_paths
from ppma.ops.padding import mask_invalid, zero_invalid

# Scores held at once: 64 MB in float32. A tile is at least one query row of one head.
TILE_SCORES = 1 << 24


def _tiles(heads: int, height: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Slices of heads and of query rows whose scores fit a tile."""
    row_scores = width * height * width
    head_step = max(1, min(heads, TILE_SCORES // row_scores))
    row_step = max(1, min(height, TILE_SCORES // (row_scores * head_step)))
    for head in range(0, heads, head_step):
        for row in range(0, height, row_step):
            yield slice(head, head + head_step), slice(row, min(row + row_step, height))


@dataclass
class _LineMatrices:
    """Line matrices of a batch of heads, or the sums of their gradients.

    Attributes:
        rows: (B, H, W, W), entry [i, j, l] is row(i)[j, l].
        columns: (B, H, H, W), entry [i, k, l] is col(l)[i, k].
    """

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, log_alpha: Tensor, log_beta: Tensor, log: bool, dtype: torch.dtype) -> "_LineMatrices":
        rows, columns = log_decay_matrix(log_alpha, -1), log_decay_matrix(log_beta, -2)
        if not log:
            rows, columns = rows.exp_(), columns.exp_()
        return cls(rows.to(dtype), columns.to(dtype))

    def factors(self, path: str, heads: slice, rows: slice) -> tuple[Tensor, Tensor]:
        """Two tensors that broadcast to the mask tile (b, i, j, k, l)."""
        row_lines, column_lines = self.rows[heads], self.columns[heads, rows]
        if path == "v2h":
            return row_lines[:, rows, :, None, :], column_lines[:, :, None, :, :]
        return row_lines.transpose(1, 2)[:, None], column_lines.transpose(2, 3)[..., None]

    def accumulate(self, path: str, heads: slice, rows: slice, grad: Tensor) -> None:
        """Add the gradient (b, i, j, k, l) of a tile's log mask to the gradients of the log line matrices."""
        if path == "v2h":
            self.rows[heads, rows] += grad.sum(3)
            self.columns[heads, rows] += grad.sum(2)
        else:
            self.rows[heads] += grad.sum(1).transpose(1, 2)
            self.columns[heads, rows] += grad.sum(4).transpose(2, 3)


def _scores(queries: Tensor, keys: Tensor, scale: float, valid: Tensor | None, heads: slice) -> Tensor:
    """(B, queries, d), (B, keys, d), `heads` of (B, keys) -> (B, queries, keys), -inf for invalid keys.

    Forward and backward pass both call this with the same tiles, and `_logits` after it: the backward pass subtracts
    the largest logit that the forward pass found, so both need the same bits. Where a logit is 1e8, one unit in its
    last place is a factor of e^8.
    """
    return mask_invalid((queries @ keys.mT).mul_(scale), None if valid is None else valid[heads])


def _logits(scores: Tensor, tile: tuple[int, ...], factors: tuple[Tensor, Tensor]) -> Tensor:
    """Scores plus log mask, of the shape of the scores."""
    a, b = factors
    return (scores.view(tile) + a).add_(b).view(scores.shape)


def _softmax(logits: Tensor, stats: Tensor) -> Tensor:
    """The softmax of (B, queries, keys) in place; `stats`, (2, B, rows, W), receives its maxima and sums.

    They are kept apart: their combination, the log-sum-exp, would round the sum away where logits are large. A row
    without a valid key has the weights 0.
    """
    top = logits.amax(-1, keepdim=True)
    top.masked_fill_(top == -torch.inf, 0.0)
    weights = logits.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    total.masked_fill_(total == 0.0, 1.0)
    stats[0], stats[1] = top.view(stats.shape[1:]), total.view(stats.shape[1:])
    return weights.div_(total)


def _softmax_from_stats(logits: Tensor, stats: Tensor) -> Tensor:
    """The result of `_softmax`, recomputed from the statistics that it saved."""
    top, total = (part.flatten(1)[..., None] for part in stats)
    return logits.sub_(top).exp_().div_(total)


def _fold(*tensors: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Merge batch and heads."""
    return [tensor.flatten(0, 1).to(dtype) for tensor in tensors]


def polyline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    options: AttentionOptions,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward; see `Backend.polyline_attention`."""
    combine, paths, scale, _ = options
    dtype = compute_dtype(q.dtype)
    logit, path_list = combine == "logit", split_paths(paths)
    out = heads_last_empty(v, v.shape[-1])
    softmaxes = options.softmaxes
    stats = torch.empty(2 * softmaxes, *q.shape[:-1], dtype=dtype, device=q.device)
    first = torch.empty(softmaxes - 1, *v.shape, dtype=dtype, device=v.device)

    H, W = q.shape[2:4]
    k, v = zero_invalid(k, valid), zero_invalid(v, valid)
    valid_keys = None if valid is None else valid.flatten(1).repeat_interleave(q.shape[1], 0)
    fq, fk, fv = _fold(q, k, v, dtype=dtype)
    lines = _LineMatrices.of(log_alpha.flatten(0, 1), log_beta.flatten(0, 1), log=logit, dtype=dtype)
    total = torch.empty(fv.shape, dtype=dtype, device=v.device)
    flat_stats, flat_first = stats.flatten(1, 2), first.flatten(1, 2)
    for heads, rows in _tiles(fq.shape[0], H, W):
        keys, values = fk[heads].flatten(1, 2), fv[heads].flatten(1, 2)
        scores = _scores(fq[heads, rows].flatten(1, 2), keys, scale, valid_keys, heads)
        tile = (scores.shape[0], -1, W, H, W)
        if logit:
            outs = []
            for p, path in enumerate(path_list):
                logits = _logits(scores, tile, lines.factors(path, heads, rows))
                outs.append(_softmax(logits, flat_stats[2 * p : 2 * p + 2, heads, rows]) @ values)
            if len(outs) == 2:
                flat_first[0, heads, rows] = outs[0].unflatten(1, (-1, W))
            result = torch.stack(outs).mean(0)
        else:
            weights = _softmax(scores, flat_stats[:, heads, rows])
            mask = torch.zeros((), dtype=dtype, device=q.device)
            for path in path_list:
                a, b = lines.factors(path, heads, rows)
                mask = torch.addcmul(mask, a, b)
            result = weights.view(tile).mul_(mask).view(weights.shape) @ values
        total[heads, rows] = result.unflatten(1, (-1, W))
    out.copy_(total.view(v.shape))
    return out, stats, first


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
    """Gradients of q, k, v, log_alpha, log_beta; each tile is recomputed from the saved maxima and sums."""
    combine, paths, scale, _ = options
    dtype = compute_dtype(q.dtype)
    logit, path_list = combine == "logit", split_paths(paths)
    H, W = q.shape[2:4]
    k, v = zero_invalid(k, valid), zero_invalid(v, valid)
    valid_keys = None if valid is None else valid.flatten(1).repeat_interleave(q.shape[1], 0)
    fq, fk, fv, fgrad = _fold(q, k, v, grad, dtype=dtype)
    lines = _LineMatrices.of(log_alpha.flatten(0, 1), log_beta.flatten(0, 1), log=logit, dtype=dtype)
    grad_lines = _LineMatrices(torch.zeros_like(lines.rows), torch.zeros_like(lines.columns))
    grad_q, grad_k, grad_v = (torch.zeros_like(t) for t in (fq, fk, fv))
    flat_stats = stats.flatten(1, 2)

    for heads, rows in _tiles(fq.shape[0], H, W):
        queries, keys = fq[heads, rows].flatten(1, 2), fk[heads].flatten(1, 2)
        values, grad_out = fv[heads].flatten(1, 2), fgrad[heads, rows].flatten(1, 2)
        scores = _scores(queries, keys, scale, valid_keys, heads)
        tile = (scores.shape[0], -1, W, H, W)
        grad_map = grad_out @ values.mT
        if logit:
            # P = softmax(s + log M): both the score and the log mask receive dS = P (dP - rowsum(P dP)).
            grad_map /= len(path_list)
            grad_scores = torch.zeros_like(scores)
            weights = torch.zeros_like(scores)
            for number, path in enumerate(path_list):
                logits = _logits(scores, tile, lines.factors(path, heads, rows))
                p = _softmax_from_stats(logits, flat_stats[2 * number : 2 * number + 2, heads, rows])
                weighted = p * grad_map
                grad_logits = weighted - p * weighted.sum(-1, keepdim=True)
                grad_lines.accumulate(path, heads, rows, grad_logits.view(tile))
                grad_scores += grad_logits
                weights += p
            weights /= len(path_list)
        else:
            # O = (P * M) V with M = sum of the paths: dS = P (dP - rowsum(P dP)), dP = G M, d log M_path = P G M_path.
            p = _softmax_from_stats(scores, flat_stats[:, heads, rows])
            weighted = p * grad_map
            grad_scores = torch.zeros_like(scores)
            weights = torch.zeros_like(scores)
            for path in path_list:
                a, b = lines.factors(path, heads, rows)
                grad_log_mask = (weighted.view(tile) * a).mul_(b)
                grad_lines.accumulate(path, heads, rows, grad_log_mask)
                grad_scores += grad_log_mask.view(scores.shape)
                weights.view(tile).addcmul_(a, b)
            weights *= p
            grad_scores -= p * grad_scores.sum(-1, keepdim=True)
        grad_v[heads] += (weights.mT @ grad_out).view(grad_v[heads].shape)
        grad_q[heads, rows] = (grad_scores @ keys).mul_(scale).unflatten(1, (-1, W))
        grad_k[heads] += (grad_scores.mT @ queries).mul_(scale).view(grad_k[heads].shape)

    grad_alpha = log_decay_gradient(grad_lines.rows)
    grad_beta = log_decay_gradient(grad_lines.columns.movedim(-1, 1)).mT  # (B, W, H) -> (B, H, W)
    return (
        heads_last_empty(q, q.shape[-1]).copy_(grad_q.view(q.shape)),
        heads_last_empty(k, k.shape[-1]).copy_(grad_k.view(k.shape)),
        heads_last_empty(v, v.shape[-1]).copy_(grad_v.view(v.shape)),
        grad_alpha.reshape(log_alpha.shape).to(log_alpha.dtype),
        grad_beta.reshape(log_beta.shape).to(log_beta.dtype).contiguous(),
    )

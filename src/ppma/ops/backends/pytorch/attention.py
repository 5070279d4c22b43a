"""Vanilla attention with the mask, by tiles of query rows: no N x N tensor for a large grid, recomputed in backward.

For query rows I the V2H mask is `rows[i, j, l] * columns[i, k, l]` and the H2V mask `rows[k, j, l] * columns[i, k, j]`:
both are broadcast products of the line matrices, which take O(N^1.5) memory for the whole grid.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ppma.ops.layout import compute_dtype, heads_last_empty, split_paths
from ppma.ops.lines import log_decay_gradient, log_decay_matrix

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
    """Line matrices of a batch of heads, and the sums of their gradients.

    `rows` is [i, j, l] = row(i)[j, l], (B, H, W, W); `columns` is [i, k, l] = col(l)[i, k], (B, H, H, W).
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


def _fold(*tensors: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Merge batch and heads."""
    return [tensor.flatten(0, 1).to(dtype) for tensor in tensors]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    combine: str,
    paths: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward; see `ppma.ops.library.attention`."""
    dtype = compute_dtype(q.dtype)
    logit, path_list = combine == "logit", split_paths(paths)
    out = heads_last_empty(v, v.shape[-1])
    softmaxes = len(path_list) if logit else 1
    lse = torch.empty(softmaxes, *q.shape[:-1], dtype=dtype, device=q.device)
    first = torch.empty(softmaxes - 1, *v.shape, dtype=dtype, device=v.device)

    H, W = q.shape[2:4]
    fq, fk, fv = _fold(q, k, v, dtype=dtype)
    lines = _LineMatrices.of(log_alpha.flatten(0, 1), log_beta.flatten(0, 1), log=logit, dtype=dtype)
    total = torch.empty(fv.shape, dtype=dtype, device=v.device)
    flat_lse, flat_first = lse.flatten(1, 2), first.flatten(1, 2)
    for heads, rows in _tiles(fq.shape[0], H, W):
        keys, values = fk[heads].flatten(1, 2), fv[heads].flatten(1, 2)
        scores = (fq[heads, rows].flatten(1, 2) @ keys.mT).mul_(scale)
        tile = (scores.shape[0], -1, W, H, W)
        if logit:
            outs = []
            for p, path in enumerate(path_list):
                a, b = lines.factors(path, heads, rows)
                logits = ((scores.view(tile) + a).add_(b)).view(scores.shape)
                norm = logits.logsumexp(-1, keepdim=True)
                outs.append(logits.sub_(norm).exp_() @ values)
                flat_lse[p, heads, rows] = norm.view(norm.shape[0], -1, W)
            if len(outs) == 2:
                flat_first[0, heads, rows] = outs[0].unflatten(1, (-1, W))
            result = torch.stack(outs).mean(0)
        else:
            norm = scores.logsumexp(-1, keepdim=True)
            flat_lse[0, heads, rows] = norm.view(norm.shape[0], -1, W)
            weights = scores.sub_(norm).exp_()
            mask = torch.zeros((), dtype=dtype, device=q.device)
            for path in path_list:
                a, b = lines.factors(path, heads, rows)
                mask = torch.addcmul(mask, a, b)
            result = weights.view(tile).mul_(mask).view(weights.shape) @ values
        total[heads, rows] = result.unflatten(1, (-1, W))
    out.copy_(total.view(v.shape))
    return out, lse, first


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    log_beta: Tensor,
    out: Tensor,
    lse: Tensor,
    first: Tensor,
    combine: str,
    paths: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_alpha, log_beta; each tile is recomputed from the saved log-sum-exp."""
    dtype = compute_dtype(q.dtype)
    logit, path_list = combine == "logit", split_paths(paths)
    H, W = q.shape[2:4]
    fq, fk, fv, fgrad = _fold(q, k, v, grad, dtype=dtype)
    lines = _LineMatrices.of(log_alpha.flatten(0, 1), log_beta.flatten(0, 1), log=logit, dtype=dtype)
    grad_lines = _LineMatrices(torch.zeros_like(lines.rows), torch.zeros_like(lines.columns))
    grad_q, grad_k, grad_v = (torch.zeros_like(t) for t in (fq, fk, fv))
    flat_lse = lse.flatten(1, 2)

    for heads, rows in _tiles(fq.shape[0], H, W):
        queries, keys = fq[heads, rows].flatten(1, 2), fk[heads].flatten(1, 2)
        values, grad_out = fv[heads].flatten(1, 2), fgrad[heads, rows].flatten(1, 2)
        scores = (queries @ keys.mT).mul_(scale)
        tile = (scores.shape[0], -1, W, H, W)
        grad_map = grad_out @ values.mT
        norms = [flat_lse[p, heads, rows].flatten(1)[..., None] for p in range(flat_lse.shape[0])]
        if logit:
            # P = softmax(s + log M): both the score and the log mask receive dS = P (dP - rowsum(P dP)).
            grad_map /= len(path_list)
            grad_scores = torch.zeros_like(scores)
            weights = torch.zeros_like(scores)
            for path, norm in zip(path_list, norms, strict=True):
                a, b = lines.factors(path, heads, rows)
                p = ((scores.view(tile) + a).add_(b)).view(scores.shape).sub_(norm).exp_()
                weighted = p * grad_map
                grad_logits = weighted - p * weighted.sum(-1, keepdim=True)
                grad_lines.accumulate(path, heads, rows, grad_logits.view(tile))
                grad_scores += grad_logits
                weights += p
            weights /= len(path_list)
        else:
            # O = (P * M) V with M = sum of the paths: dS = P (dP - rowsum(P dP)), dP = G M, d log M_path = P G M_path.
            p = scores.sub_(norms[0]).exp_()
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

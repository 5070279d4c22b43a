"""The interface of structured masks, with attention through the dense form of the log mask."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ppma.ops import checks
from ppma.ops.layout import compute_dtype
from ppma.ops.options import COMBINES, BackendName, Combine, Path
from ppma.ops.padding import mask_invalid, softmax, zero_invalid


class StructuredMask(ABC):
    """A mask on an H x W grid for a batch of heads; `...` are its batch axes.

    Attributes:
        paths: the order of each path in criss-cross attention, "v2h" (within columns, then within rows) or "h2v".
    """

    paths: tuple[Path, ...]

    @abstractmethod
    def rows(self) -> Tensor:
        """Log mask within each row, (paths, ..., H, W, W)."""

    @abstractmethod
    def columns(self) -> Tensor:
        """Log mask within each column, (paths, ..., W, H, H)."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Log mask between all tokens, (paths, ..., H*W, H*W)."""

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        combine: Combine = "hadamard",
        scale: float | None = None,
        valid: Tensor | None = None,
        backend: BackendName = "auto",
    ) -> Tensor:
        """Full attention with this mask.

        Args:
            q: (..., heads, H, W, d).
            k: (..., heads, H, W, d).
            v: (..., heads, H, W, dv).
            combine: "hadamard" (mask after the softmax, paths summed) or "logit" (log mask inside the softmax, paths
                averaged).
            scale: factor on `q k^T`; d**-0.5 if None.
            valid: boolean (..., H, W) without heads, False at tokens that take no part as keys; all do if None.
            backend: for masks that run on an operator.

        Returns:
            (..., heads, H, W, dv).
        """
        checks.one_of("combine", combine, COMBINES)
        k, v = zero_invalid(k, valid), zero_invalid(v, valid)
        flat_q, flat_k, flat_v = (tensor.flatten(-3, -2) for tensor in (q, k, v))
        keys = None if valid is None else valid.flatten(-2)[..., None, :]
        maps = _masked_softmax(flat_q, flat_k, self.dense(), combine, scale, keys)
        return (merge(maps, combine) @ flat_v).unflatten(-2, v.shape[-3:-1])

    def criss_cross(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        combine: Combine = "hadamard",
        scale: float | None = None,
        valid: Tensor | None = None,
        backend: BackendName = "auto",
    ) -> Tensor:
        """Criss-cross attention with this mask, through its blocks within rows and within columns.

        Arguments and result as in `attention`.
        """
        checks.one_of("combine", combine, COMBINES)
        k, v = zero_invalid(k, valid), zero_invalid(v, valid)
        in_rows, in_columns = (None, None) if valid is None else (valid[..., None, :, :], valid.mT[..., None, :, :])
        rows = _masked_softmax(q, k, self.rows(), combine, scale, in_rows)
        columns = _masked_softmax(_swap(q), _swap(k), self.columns(), combine, scale, in_columns)
        outs = [
            row @ _swap(column @ _swap(v)) if path == "v2h" else _swap(column @ _swap(row @ v))
            for path, row, column in zip(self.paths, rows, columns, strict=True)
        ]
        return merge(outs, combine)

    def decomposed(
        self, s1: Tensor, s2: Tensor, v: Tensor, *, combine: Combine = "hadamard", backend: BackendName = "auto"
    ) -> Tensor:
        """Attention with the weights S1 S2, of rank D, and this mask.

        Args:
            s1: (..., heads, H, W, D), the rows of S1.
            s2: (..., heads, H, W, D), the columns of S2.
            v: (..., heads, H, W, dv).
            combine: "hadamard": `((S1 S2) * mask) v`, paths summed. "logit": the same, with weights that sum to 1 for
                each path, paths averaged; as a softmax of scores plus log mask does it.
            backend: for masks that run on an operator.

        Returns:
            (..., heads, H, W, dv).
        """
        checks.one_of("combine", combine, COMBINES)
        flat_s1, flat_s2, flat_v = (tensor.flatten(-3, -2) for tensor in (s1, s2, v))
        maps = [(flat_s1 @ flat_s2.mT) * path.exp().to(s1.dtype) for path in self.dense()]
        if combine == "logit":
            maps = [divide(weights, weights.sum(-1, keepdim=True)) for weights in maps]
        return merge([weights @ flat_v for weights in maps], combine).unflatten(-2, v.shape[-3:-1])


def divide(a: Tensor, b: Tensor) -> Tensor:
    """The quotient a / b, and 0 where b is 0: a query that no key reaches."""
    nothing = b == 0
    return (a / b.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)


def _swap(x: Tensor) -> Tensor:
    return x.transpose(-3, -2)


def merge(outs: list[Tensor], combine: Combine) -> Tensor:
    """The results of the paths in one: summed ("hadamard") or averaged ("logit")."""
    total = torch.stack(outs)
    return total.sum(0) if combine == "hadamard" else total.mean(0)


def _masked_softmax(
    q: Tensor, k: Tensor, log_mask: Tensor, combine: Combine, scale: float | None, valid: Tensor | None
) -> list[Tensor]:
    """One map for each path, in the dtype of q: softmax(s) * mask or softmax(s + log mask), over the valid keys."""
    scores = (q @ k.mT).to(compute_dtype(q.dtype)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores, padded = mask_invalid(scores, valid), valid is not None
    if combine == "hadamard":
        weights = softmax(scores, padded)
        maps = [weights * path.exp() for path in log_mask]
    else:
        maps = [softmax(scores + path, padded) for path in log_mask]
    return [weights.to(q.dtype) for weights in maps]

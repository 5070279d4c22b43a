"""What every structured mask can do, through the dense form of its logarithm."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ppma.ops import checks
from ppma.ops.options import COMBINES, BackendName, Combine, Path


class StructuredMask(ABC):
    """A mask on an H x W grid for a batch of heads; `...` stands for its batch axes."""

    # How each path goes in criss-cross attention: "v2h" within columns, then within rows; "h2v" the other way round.
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
            backend: for masks that run on an operator.

        Returns:
            (..., heads, H, W, dv).
        """
        checks.one_of("combine", combine, COMBINES)
        flat_q, flat_k, flat_v = (tensor.flatten(-3, -2) for tensor in (q, k, v))
        maps = _masked_softmax(flat_q, flat_k, self.dense(), combine, scale)
        return (_merge(maps, combine) @ flat_v).unflatten(-2, v.shape[-3:-1])

    def criss_cross(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        combine: Combine = "hadamard",
        scale: float | None = None,
        backend: BackendName = "auto",
    ) -> Tensor:
        """Criss-cross attention with this mask, through its blocks within rows and within columns.

        Arguments and result as in `attention`.
        """
        checks.one_of("combine", combine, COMBINES)
        rows = _masked_softmax(q, k, self.rows(), combine, scale)
        columns = _masked_softmax(_swap(q), _swap(k), self.columns(), combine, scale)
        outs = [
            row @ _swap(column @ _swap(v)) if path == "v2h" else _swap(column @ _swap(row @ v))
            for path, row, column in zip(self.paths, rows, columns, strict=True)
        ]
        return _merge(outs, combine)


def _swap(x: Tensor) -> Tensor:
    return x.transpose(-3, -2)


def _merge(outs: list[Tensor], combine: Combine) -> Tensor:
    total = torch.stack(outs)
    return total.sum(0) if combine == "hadamard" else total.mean(0)


def _masked_softmax(q: Tensor, k: Tensor, log_mask: Tensor, combine: Combine, scale: float | None) -> list[Tensor]:
    """One map for each path, in the dtype of q: softmax(s) * mask or softmax(s + log mask)."""
    scores = (q @ k.mT).float() if q.dtype != torch.float64 else q @ k.mT
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if combine == "hadamard":
        weights = scores.softmax(-1)
        maps = [weights * path.exp() for path in log_mask]
    else:
        maps = [(scores + path).softmax(-1) for path in log_mask]
    return [weights.to(q.dtype) for weights in maps]

"""The structured masks that the paper compares, behind one interface.

A mask lives on an H x W grid and has one or two paths. Each path gives its logarithm within rows, within columns and
between all tokens, so both attentions can use any mask. The polyline masks run on the operators of `ppma.ops` and
never build those blocks; the scan masks have no such structure and use the general, dense form.

| name | paths | learned decays |
| --- | --- | --- |
| none | 1 | 0 |
| rmt | 1: Manhattan distance, fixed decay for each head | 0 |
| cross | 2: row-major and column-major scan | 2 |
| hilbert | 2: Hilbert scan and its transpose | 2 |
| v2h | 1: V2H polyline | 2 |
| 2d | 2: V2H and H2V polyline | 2 |
| shared | 2: the same with alpha = beta | 1 |
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ppma.ops import checks, criss_cross_attention, curves, polyline_attention, polyline_mask
from ppma.ops.functional import COMBINES
from ppma.ops.layout import ND_PATHS, split_paths
from ppma.ops.lines import log_decay_matrix, log_differences, potentials


class StructuredMask(ABC):
    """A mask on an H x W grid for a batch of heads; `...` stands for its batch axes."""

    # How each path goes in criss-cross attention: "v2h" within columns, then within rows; "h2v" the other way round.
    paths: tuple[str, ...]

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
        combine: str = "hadamard",
        scale: float | None = None,
        backend: str = "auto",
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
        out = _merge([weights @ flat_v for weights in maps], combine)
        return out.unflatten(-2, v.shape[-3:-1])

    def criss_cross(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        combine: str = "hadamard",
        scale: float | None = None,
        backend: str = "auto",
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


def _merge(outs: list[Tensor], combine: str) -> Tensor:
    total = torch.stack(outs)
    return total.sum(0) if combine == "hadamard" else total.mean(0)


def _masked_softmax(q: Tensor, k: Tensor, log_mask: Tensor, combine: str, scale: float | None) -> list[Tensor]:
    """One map for each path, in the dtype of q: softmax(s) * mask or softmax(s + log mask)."""
    scores = (q @ k.mT).float() if q.dtype != torch.float64 else q @ k.mT
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if combine == "hadamard":
        weights = scores.softmax(-1)
        maps = [weights * path.exp() for path in log_mask]
    else:
        maps = [(scores + path).softmax(-1) for path in log_mask]
    return [weights.to(q.dtype) for weights in maps]


class PolylineMask(StructuredMask):
    """The polyline path mask, and with constant decays every mask that depends on the Manhattan distance.

    Args:
        log_alpha: (..., H, W), <= 0.
        log_beta: (..., H, W), <= 0.
        paths: "v2h", "h2v" or "2d".
    """

    def __init__(self, log_alpha: Tensor, log_beta: Tensor, paths: str = "2d") -> None:
        checks.one_of("paths", paths, ND_PATHS)
        self.log_alpha, self.log_beta = checks.log_decays({"log_alpha": log_alpha, "log_beta": log_beta}, axes=2)
        self.operator_paths = paths
        self.paths = split_paths(paths)

    def _for_each_path(self, block: Tensor) -> Tensor:
        return block.to(self.log_alpha.dtype).expand(len(self.paths), *block.shape)

    def rows(self) -> Tensor:
        return self._for_each_path(log_decay_matrix(self.log_alpha))

    def columns(self) -> Tensor:
        return self._for_each_path(log_decay_matrix(self.log_beta.mT))

    def dense(self) -> Tensor:
        return torch.stack([polyline_mask(self.log_alpha, self.log_beta, paths=p, log=True) for p in self.paths])

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return polyline_attention(q, k, v, self.log_alpha, self.log_beta, paths=self.operator_paths, **options)

    def criss_cross(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return criss_cross_attention(q, k, v, self.log_alpha, self.log_beta, paths=self.operator_paths, **options)


class ScanMask(StructuredMask):
    """A mask from 1D scans: the decay between two tokens is the product along the scan between them.

    Args:
        log_decays: one (..., H, W) tensor for each scan, <= 0; the entry of a token belongs to the step that reaches
            it, so the first token's is never read.
        orders: one visiting order for each scan, as raster indices.
    """

    paths = ("v2h", "h2v")

    def __init__(self, log_decays: list[Tensor], orders: list[tuple[int, ...]]) -> None:
        named = {f"log_decays[{i}]": decay for i, decay in enumerate(log_decays)}
        self.log_decays = checks.log_decays(named, axes=2)
        self.grid = tuple(self.log_decays[0].shape[-2:])
        self.orders = orders

    def _blocks(self, arrange: Callable[[Tensor], Tensor]) -> Tensor:
        """Log differences within the groups of tokens that `arrange` puts along the last axis of a (..., H, W)."""
        blocks = []
        for log_decay, order in zip(self.log_decays, self.orders, strict=True):
            visit = torch.tensor(order, device=log_decay.device)
            rank = torch.empty_like(visit)
            rank[visit] = torch.arange(len(order), device=visit.device)
            potential, cuts = potentials(log_decay.flatten(-2)[..., visit])
            potential, cuts, ranks = (
                arrange(t[..., rank].unflatten(-1, self.grid)) for t in (potential, cuts, rank[visit])
            )
            differences = log_differences(potential, cuts, ranks)
            blocks.append(differences.to(log_decay.dtype))
        return torch.stack(blocks)

    def rows(self) -> Tensor:
        return self._blocks(lambda t: t)

    def columns(self) -> Tensor:
        return self._blocks(lambda t: t.mT)

    def dense(self) -> Tensor:
        return self._blocks(lambda t: t.flatten(-2))


def none(grid: tuple[int, int], *, device: torch.device | str | None = None) -> PolylineMask:
    """No mask: all decays 1, one path (rows before columns in criss-cross attention)."""
    zero = torch.zeros((), device=device).expand(grid)
    return PolylineMask(zero, zero, "h2v")


def rmt_log_decay(heads: int, span: float) -> Tensor:
    """RMT's fixed log-decays, log(1 - 2^-(2 + span * h / heads)) for head h: (heads,)."""
    return torch.tensor([math.log1p(-(2.0 ** -(2 + span * head / heads))) for head in range(heads)])


def rmt(log_decay: Tensor, grid: tuple[int, int]) -> PolylineMask:
    """The RMT mask, `log decay * (|i-k| + |j-l|)`: a polyline mask with one constant decay for each head.

    Args:
        log_decay: (heads,), as from `rmt_log_decay`.
        grid: (H, W).
    """
    constant = log_decay[:, None, None].expand(-1, *grid)
    return PolylineMask(constant, constant, "h2v")


def cross(log_alpha: Tensor, log_beta: Tensor) -> ScanMask:
    """Cross scan: the rows one after the other with alpha, the columns one after the other with beta."""
    grid = log_alpha.shape[-2:]
    return ScanMask([log_alpha, log_beta], [curves.row_major(*grid), curves.column_major(*grid)])


def hilbert(log_alpha: Tensor, log_beta: Tensor) -> ScanMask:
    """Hilbert scan with alpha, and its transpose with beta."""
    H, W = log_alpha.shape[-2:]
    return ScanMask([log_alpha, log_beta], [curves.hilbert(H, W), curves.transposed(curves.hilbert(W, H), H, W)])


def v2h(log_alpha: Tensor, log_beta: Tensor) -> PolylineMask:
    """The V2H polyline path mask alone."""
    return PolylineMask(log_alpha, log_beta, "v2h")


def polyline(log_alpha: Tensor, log_beta: Tensor) -> PolylineMask:
    """The 2D polyline path mask, V2H and H2V; with log_beta = log_alpha it is the "shared" ablation."""
    return PolylineMask(log_alpha, log_beta, "2d")


@dataclass(frozen=True)
class MaskKind:
    """What a model needs to know of a mask: how many decays it learns, and how to build it from them."""

    learned: int
    build: Callable[[Tensor, Tensor], StructuredMask] | None = None


# "none" and "rmt" learn nothing and are built from the grid alone, by the functions above.
KINDS = {
    "none": MaskKind(0),
    "rmt": MaskKind(0),
    "cross": MaskKind(2, cross),
    "hilbert": MaskKind(2, hilbert),
    "v2h": MaskKind(2, v2h),
    "2d": MaskKind(2, polyline),
    "shared": MaskKind(1, polyline),
}

"""Masks along one-dimensional scans of the grid."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ppma.masks import curves
from ppma.masks.base import StructuredMask, merge
from ppma.masks.polyline import PolylineMask, v2h
from ppma.ops import checks
from ppma.ops.decay_matrix import log_differences, potentials
from ppma.ops.options import COMBINES, Combine


class ScanMask(StructuredMask):
    """A mask from 1D scans: the decay between two tokens is the product along the scan between them.

    In its visiting order, a scan is a grid of one row with the V2H mask. Attention over all pairs runs there, on the
    polyline operators, once for each scan; criss-cross attention, whose lines are not those of the scan, uses the
    blocks of the log mask.

    Args:
        log_decays: one (..., H, W) tensor for each scan, <= 0; the entry of a token belongs to the step that reaches
            it, so the first token's is never read.
        orders: one visiting order for each scan, as raster indices.

    Examples:
        >>> import torch
        >>> from ppma import masks
        >>> half = torch.full((2, 2), 0.5).log()
        >>> masks.cross(half, half).dense()[0, 0].exp()
        tensor([1.0000, 0.5000, 0.2500, 0.1250])
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
            visit = torch.tensor(order).to(log_decay.device, non_blocking=True)
            rank = torch.empty_like(visit)
            rank[visit] = torch.arange(len(order), device=visit.device)
            potential, cuts = potentials(log_decay.flatten(-2)[..., visit])
            potential, cuts, ranks = (
                arrange(t[..., rank].unflatten(-1, self.grid)) for t in (potential, cuts, rank[visit])
            )
            differences = log_differences(potential, cuts, ranks)
            blocks.append(differences.to(log_decay.dtype))
        return torch.stack(blocks)

    def _scanned(self, attention: Callable[..., Tensor], tensors: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
        """Attention along each scan, of (..., H, W, d) tensors: one result for each, (..., H, W, dv)."""
        valid = options.pop("valid", None)
        outs = []
        for log_decay, order in zip(self.log_decays, self.orders, strict=True):
            visit = torch.tensor(order, device=log_decay.device)
            line = log_decay.flatten(-2)[..., None, visit]
            keys = {} if valid is None else {"valid": valid.flatten(-2)[..., None, visit]}
            scanned = (tensor.flatten(-3, -2)[..., None, visit, :] for tensor in tensors)
            out = attention(v2h(line, line), *scanned, **keys, **options).squeeze(-3)
            outs.append(out[..., visit.argsort(), :].unflatten(-2, self.grid))
        return outs

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, combine: Combine = "hadamard", **options: Any) -> Tensor:
        checks.one_of("combine", combine, COMBINES)
        return merge(self._scanned(PolylineMask.attention, (q, k, v), combine=combine, **options), combine)

    def decomposed(self, s1: Tensor, s2: Tensor, v: Tensor, *, combine: Combine = "hadamard", **options: Any) -> Tensor:
        checks.one_of("combine", combine, COMBINES)
        return merge(self._scanned(PolylineMask.decomposed, (s1, s2, v), combine=combine, **options), combine)

    def rows(self) -> Tensor:
        return self._blocks(lambda t: t)

    def columns(self) -> Tensor:
        return self._blocks(lambda t: t.mT)

    def dense(self) -> Tensor:
        return self._blocks(lambda t: t.flatten(-2))


def cross(log_alpha: Tensor, log_beta: Tensor) -> ScanMask:
    """Cross scan: the rows one after the other with alpha, the columns one after the other with beta."""
    grid = log_alpha.shape[-2:]
    return ScanMask([log_alpha, log_beta], [curves.row_major(*grid), curves.column_major(*grid)])


def hilbert(log_alpha: Tensor, log_beta: Tensor) -> ScanMask:
    """Hilbert scan with alpha, and its transpose with beta."""
    H, W = log_alpha.shape[-2:]
    return ScanMask([log_alpha, log_beta], [curves.hilbert(H, W), curves.transposed(curves.hilbert(W, H), H, W)])

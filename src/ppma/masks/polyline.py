"""Polyline path masks, and the masks that are polyline masks with constant decays."""

from typing import Any

import torch
from torch import Tensor

from ppma.masks.base import StructuredMask, divide
from ppma.ops import checks, criss_cross_attention, decomposed_attention, polyline_attention, polyline_mask
from ppma.ops.decay_matrix import log_decay_matrix
from ppma.ops.options import COMBINES, ND_PATHS, BackendName, Combine, Paths, split_paths


class PolylineMask(StructuredMask):
    """The polyline path mask, and with constant decays every mask that depends on the Manhattan distance.

    Args:
        log_alpha: (..., H, W), <= 0.
        log_beta: (..., H, W), <= 0.
        paths: "v2h", "h2v" or "2d".

    Examples:
        >>> import torch
        >>> from ppma import masks
        >>> mask = masks.PolylineMask(*-torch.rand(2, 4, 6, 5))
        >>> q, k, v = torch.randn(3, 1, 4, 6, 5, 8)
        >>> mask.attention(q, k, v).shape, mask.criss_cross(q, k, v).shape, mask.dense().shape
        (torch.Size([1, 4, 6, 5, 8]), torch.Size([1, 4, 6, 5, 8]), torch.Size([2, 4, 30, 30]))
    """

    def __init__(self, log_alpha: Tensor, log_beta: Tensor, paths: Paths = "2d") -> None:
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

    def decomposed(
        self, s1: Tensor, s2: Tensor, v: Tensor, *, combine: Combine = "hadamard", backend: BackendName = "auto"
    ) -> Tensor:
        checks.one_of("combine", combine, COMBINES)
        decays = (self.log_alpha, self.log_beta)
        if combine == "hadamard":
            return decomposed_attention(s1, s2, v, *decays, paths=self.operator_paths, backend=backend)
        summed = torch.cat((v, torch.ones_like(v[..., :1])), -1)  # the last channel sums the weights
        outs = [decomposed_attention(s1, s2, summed, *decays, paths=path, backend=backend) for path in self.paths]
        return torch.stack([divide(out[..., :-1], out[..., -1:]) for out in outs]).mean(0)


def none(grid: tuple[int, int], *, device: torch.device | str | None = None) -> PolylineMask:
    """No mask: all decays 1, one path (rows before columns in criss-cross attention).

    Examples:
        >>> from ppma import masks
        >>> masks.none((2, 3)).dense().exp().unique()
        tensor([1.])
    """
    zero = torch.zeros((), device=device).expand(grid)
    return PolylineMask(zero, zero, "h2v")


def rmt_log_decay(heads: int, span: float, device: torch.device | None = None) -> Tensor:
    """RMT's fixed log-decays, log(1 - 2^-(2 + span * h / heads)) for head h: (heads,)."""
    # on the device: a list of numbers would be a CPU tensor in a captured graph; rounded once, as in the authors' files
    head = torch.arange(heads, dtype=torch.float64, device=device)
    return torch.log1p(-(2.0 ** -(2 + span * head / heads))).float()


def rmt(log_decay: Tensor, grid: tuple[int, int]) -> PolylineMask:
    """The RMT mask, `log decay * (|i-k| + |j-l|)`: a polyline mask with one constant decay for each head.

    Args:
        log_decay: (heads,), as from `rmt_log_decay`.
        grid: (H, W).

    Examples:
        >>> from ppma import masks
        >>> masks.rmt(masks.rmt_log_decay(heads=1, span=4.0), (2, 2)).dense()[0, 0, 0].exp()
        tensor([1.0000, 0.7500, 0.7500, 0.5625])
    """
    constant = log_decay[:, None, None].expand(-1, *grid)
    return PolylineMask(constant, constant, "h2v")


def v2h(log_alpha: Tensor, log_beta: Tensor) -> PolylineMask:
    """The V2H polyline path mask alone."""
    return PolylineMask(log_alpha, log_beta, "v2h")


def polyline_2d(log_alpha: Tensor, log_beta: Tensor) -> PolylineMask:
    """The 2D polyline path mask, V2H and H2V; with log_beta = log_alpha it is the "shared" ablation."""
    return PolylineMask(log_alpha, log_beta, "2d")

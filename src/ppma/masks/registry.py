"""The masks by name."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ppma.masks.base import StructuredMask
from ppma.masks.polyline import polyline_2d, v2h
from ppma.masks.scan import cross, hilbert


@dataclass(frozen=True)
class MaskKind:
    """How a model builds a mask.

    Attributes:
        learned: number of learned decays for each token and head, 0 to 2.
        build: takes log_alpha and log_beta, (B, heads, H, W) each; None for masks without learned decays.
    """

    learned: int
    build: Callable[[Tensor, Tensor], StructuredMask] | None = None


# "none" and "rmt" learn nothing and are built from the grid alone, by `none` and `rmt`.
KINDS = {
    "none": MaskKind(0),
    "rmt": MaskKind(0),
    "cross": MaskKind(2, cross),
    "hilbert": MaskKind(2, hilbert),
    "v2h": MaskKind(2, v2h),
    "2d": MaskKind(2, polyline_2d),
    "shared": MaskKind(1, polyline_2d),
}

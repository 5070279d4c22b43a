"""The masks by name."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ppma.masks.base import StructuredMask
from ppma.masks.polyline import polyline_2d, v2h
from ppma.masks.scan import cross, hilbert


@dataclass(frozen=True)
class MaskKind:
    """What a model needs to know of a mask: how many decays it learns, and how to build it from them."""

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

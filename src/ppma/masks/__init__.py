"""The structured masks that the paper compares, behind one interface.

A mask on an H x W grid has one or two paths. Each path gives its logarithm within rows, within columns and between all
tokens, so that every attention can use every mask. The polyline masks run on the operators of `ppma.ops` and never
build these blocks; the scan masks do so too, but for criss-cross attention, which takes the general form.

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

from ppma.masks.base import StructuredMask
from ppma.masks.polyline import PolylineMask, none, polyline_2d, rmt, rmt_log_decay, v2h
from ppma.masks.prefix import PrefixedMask
from ppma.masks.registry import KINDS, MaskKind
from ppma.masks.scan import ScanMask, cross, hilbert

__all__ = [
    "KINDS",
    "MaskKind",
    "PolylineMask",
    "PrefixedMask",
    "ScanMask",
    "StructuredMask",
    "cross",
    "hilbert",
    "none",
    "polyline_2d",
    "rmt",
    "rmt_log_decay",
    "v2h",
]

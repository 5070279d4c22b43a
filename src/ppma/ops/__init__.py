"""Masks, scans and masked attentions, and the backends that compute them."""

from ppma.ops.backends import BackendUnavailableError
from ppma.ops.causal import causal_attention, causal_mask, causal_scan
from ppma.ops.checks import validation
from ppma.ops.functional import (
    criss_cross_attention,
    decomposed_attention,
    linear_attention,
    polyline_attention,
    polyline_scan,
    polyline_scan_nd,
)
from ppma.ops.mask import polyline_mask, polyline_mask_nd

__all__ = [
    "BackendUnavailableError",
    "causal_attention",
    "causal_mask",
    "causal_scan",
    "criss_cross_attention",
    "decomposed_attention",
    "linear_attention",
    "polyline_attention",
    "polyline_mask",
    "polyline_mask_nd",
    "polyline_scan",
    "polyline_scan_nd",
    "validation",
]

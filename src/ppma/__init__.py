"""Polyline path masked attention: structured 2D masks for attention, exact and fast."""

from ppma.models import CheckpointError, load_checkpoint, open_checkpoint, optimize_for_inference, save_checkpoint
from ppma.models.warmup import warmup
from ppma.ops import (
    BackendUnavailableError,
    causal_attention,
    causal_mask,
    causal_scan,
    criss_cross_attention,
    decomposed_attention,
    linear_attention,
    polyline_attention,
    polyline_mask,
    polyline_mask_nd,
    polyline_scan,
    polyline_scan_nd,
    validation,
)

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "CheckpointError",
    "__version__",
    "causal_attention",
    "causal_mask",
    "causal_scan",
    "criss_cross_attention",
    "decomposed_attention",
    "linear_attention",
    "load_checkpoint",
    "open_checkpoint",
    "optimize_for_inference",
    "polyline_attention",
    "polyline_mask",
    "polyline_mask_nd",
    "polyline_scan",
    "polyline_scan_nd",
    "save_checkpoint",
    "validation",
    "warmup",
]

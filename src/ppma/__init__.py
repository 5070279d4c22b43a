"""Polyline path masked attention: structured 2D masks for attention, exact and fast."""

from ppma.engine.optim import parameter_groups
from ppma.models import (
    CheckpointError,
    export,
    load_checkpoint,
    load_retrofit,
    open_checkpoint,
    optimize_for_inference,
    retrofit,
    save_checkpoint,
    save_retrofit,
)
from ppma.models.export import export_onnx
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
    "export",
    "export_onnx",
    "linear_attention",
    "load_checkpoint",
    "load_retrofit",
    "open_checkpoint",
    "optimize_for_inference",
    "parameter_groups",
    "polyline_attention",
    "polyline_mask",
    "polyline_mask_nd",
    "polyline_scan",
    "polyline_scan_nd",
    "retrofit",
    "save_checkpoint",
    "save_retrofit",
    "validation",
    "warmup",
]

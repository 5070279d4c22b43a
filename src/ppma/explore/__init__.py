"""Inspect a model's decays, masks and attention, as tensors and as figures (matplotlib)."""

from ppma.explore.capture import AttentionRecord, capture, capture_image, find_record
from ppma.explore.query import QueryPanels, WhatIf, query_attention, query_mask, query_panels, query_weights

__all__ = [
    "AttentionRecord",
    "QueryPanels",
    "WhatIf",
    "capture",
    "capture_image",
    "find_record",
    "query_attention",
    "query_mask",
    "query_panels",
    "query_weights",
]

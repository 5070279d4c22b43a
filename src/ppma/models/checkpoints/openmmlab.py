"""Layouts of MMSegmentation and MMDetection, which the authors used for these tasks."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

SEGMENTATION_CLASSIFIER = "decode_head.conv_seg.weight"  # identifies MMSegmentation's files
SEGMENTATION_HEADS = ("decode_head.", "auxiliary_head.")
_DETECTION_HEADS = ("rpn_head.", "roi_head.", "bbox_head.", "mask_head.")  # identify MMDetection's
# Patterns of MMSegmentation's names, with our names.
_RENAMED = ((r"\.bn\.", ".batch_norm."), (r"head\.conv_seg\.", "head.classifier.1."))


def task_in(contents: Any) -> str | None:
    """The task of a file: "segmentation" for MMSegmentation's, "detection" for MMDetection's, else None."""
    state = contents.get("state_dict") if isinstance(contents, Mapping) else None
    names = [name for name in state if isinstance(name, str)] if isinstance(state, Mapping) else []
    if SEGMENTATION_CLASSIFIER in names:
        return "segmentation"
    return "detection" if any(name.startswith(_DETECTION_HEADS) for name in names) else None


def facts_in(contents: Any) -> dict[str, Any]:
    """Class names and colours from the `meta` of a file, if it has them."""
    meta = contents.get("meta") if isinstance(contents, Mapping) else None
    if not isinstance(meta, Mapping) or not isinstance(meta.get("CLASSES"), list | tuple):
        return {}
    return {"classes": meta["CLASSES"], "palette": meta.get("PALETTE")}


def convert_segmentation_heads(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of both heads with our names."""
    converted = {}
    for name, tensor in state.items():
        if isinstance(name, str) and name.startswith(SEGMENTATION_HEADS):
            for pattern, ours in _RENAMED:
                name = re.sub(pattern, ours, name)
            converted[name] = tensor
    return converted

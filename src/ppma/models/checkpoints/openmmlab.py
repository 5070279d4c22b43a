"""Layouts of MMSegmentation and MMDetection, which the authors used for these tasks."""

import re
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ppma.models.checkpoints.weights import CheckpointError

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


def convert_segmentation_heads(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of both heads with our names."""
    converted = {}
    for name, tensor in state.items():
        if isinstance(name, str) and name.startswith(SEGMENTATION_HEADS):
            for pattern, ours in _RENAMED:
                name = re.sub(pattern, ours, name)
            converted[name] = tensor
    return converted


class Meta(NamedTuple):
    """Classes of the data set that a model was trained on.

    Attributes:
        classes: names in the order of the outputs, None if the file has none.
        palette: an RGB colour for each class, None if the file has none.
    """

    classes: tuple[str, ...] | None
    palette: tuple[tuple[int, int, int], ...] | None


def read_meta(contents: Any, source: str) -> Meta:
    """Read `CLASSES` and `PALETTE` in the `meta` of a file; `source` names it in messages."""
    meta = contents.get("meta") if isinstance(contents, Mapping) else None
    classes, palette = (meta.get(key) if isinstance(meta, Mapping) else None for key in ("CLASSES", "PALETTE"))
    if classes is None:
        return Meta(None, None)
    named = isinstance(classes, list | tuple) and all(isinstance(name, str) for name in classes)
    if not named or not classes or len(set(classes)) < len(classes):
        raise CheckpointError(f"{source}: meta.CLASSES: expected different names, got {reprlib.repr(classes)}")
    if palette is None:
        return Meta(tuple(classes), None)
    try:
        colours = tuple((int(red), int(green), int(blue)) for red, green, blue in palette)
    except (TypeError, ValueError, OverflowError):
        colours = ()
    if len(colours) != len(classes) or not all(0 <= value <= 255 for colour in colours for value in colour):
        raise CheckpointError(f"{source}: meta.PALETTE: expected a colour, three numbers from 0 to 255, for each class")
    return Meta(tuple(classes), colours)

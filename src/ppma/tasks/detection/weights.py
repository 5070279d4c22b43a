"""Weight files of detectors: ours and MMDetection's, which the authors used."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppma import config as configs
from ppma.atomic import write_atomically
from ppma.data.coco import CocoDataConfig
from ppma.models import Checkpoint, CheckpointError, open_checkpoint
from ppma.models.checkpoints import mmdetection
from ppma.models.checkpoints.weights import build, check_tensors
from ppma.tasks.dense.backbone import Backbone, dense_backbone_of
from ppma.tasks.dense.weights import load_model, save_model
from ppma.tasks.detection.config import DetectorConfig, ScoringConfig
from ppma.tasks.detection.model import PolylineMaskRCNN


def make_detector(body: Backbone, config: Any, classes: int) -> PolylineMaskRCNN:
    """The detector of a `DetectionConfig` or a `ScoringConfig` for `classes` classes besides the background."""
    return PolylineMaskRCNN(body, classes + 1, config.detector, config.data.mean, config.data.std)


def load_detector(
    path: str | Path | Checkpoint, **changes: Any
) -> tuple[PolylineMaskRCNN, ScoringConfig, tuple[str, ...]]:
    """Load a trained detector.

    A file of MMDetection gives the same boxes, scores and masks as MMDetection 2.28 does with it.

    Args:
        path: a file of `ppma train` or of MMDetection, or an open one.
        changes: fields of `BackboneConfig` to override, for files of MMDetection.

    Returns:
        The detector in evaluation mode, its configuration, and the class names; a file without names has numbers.
    """
    checkpoint = open_checkpoint(path)
    if checkpoint.task == "detection" and not checkpoint.native:
        return _load_mmdetection(checkpoint, **changes)
    return load_model(checkpoint, "detection", ScoringConfig, make_detector)


def _load_mmdetection(
    checkpoint: Checkpoint, **changes: Any
) -> tuple[PolylineMaskRCNN, ScoringConfig, tuple[str, ...]]:
    source = str(checkpoint.path)
    _, backbone, state = checkpoint.backbone_weights(**changes)
    heads = mmdetection.heads_in(checkpoint.contents["state_dict"])
    check_tensors(heads, source=source)
    config = ScoringConfig(CocoDataConfig(root=""), _detector_of(heads, source))
    count = _rows(heads, mmdetection.CLASSIFIER, source) - 1
    classes = checkpoint.classes or tuple(map(str, range(count)))
    if len(classes) != count:
        raise CheckpointError(f"{source}: expected {count} names in meta.CLASSES, got {len(classes)}")
    weights = {f"{mmdetection.BODY}{name}": tensor for name, tensor in state.items()}
    weights |= mmdetection.convert_heads(heads)
    model = build(lambda: make_detector(dense_backbone_of(backbone), config, count), weights, source=source)
    return model, config, classes


def _detector_of(heads: Mapping[str, Tensor], source: str) -> DetectorConfig:
    convolutions = 0
    while mmdetection.MASK_LAYER.format(convolutions) in heads:
        convolutions += 1
    try:
        return DetectorConfig.mmdetection(
            channels=_rows(heads, mmdetection.PYRAMID_LAYER, source),
            box_channels=_rows(heads, mmdetection.BOX_LAYER, source),
            mask_convolutions=convolutions,
        )
    except configs.ConfigError as error:
        raise CheckpointError(f"{source}: {error}") from None


def _rows(heads: Mapping[str, Tensor], name: str, source: str) -> int:
    if name not in heads or heads[name].ndim < 2:
        raise CheckpointError(f"{source}: expected a Mask R-CNN in MMDetection's layout, found no weight {name!r}")
    return heads[name].shape[0]


def convert_detector(checkpoint: Checkpoint, target: Path, **changes: Any) -> str | None:
    """Convert MMDetection's Mask R-CNN to our format (.safetensors), or ours to MMDetection's (.pth)."""
    known = checkpoint.native or mmdetection.CLASSIFIER in mmdetection.heads_in(checkpoint.contents["state_dict"])
    if checkpoint.native != (target.suffix == ".pth") or not known:
        return None
    model, config, classes = load_detector(checkpoint, **changes)
    if checkpoint.native:
        export_mmdetection(model, target, classes)
    else:
        save_detector(model, target, config, classes)
    return f"{target}: Mask R-CNN, {len(classes)} classes, {sum(p.numel() for p in model.parameters()):,} parameters"


def export_mmdetection(model: PolylineMaskRCNN, path: Path, classes: tuple[str, ...]) -> None:
    """Write a detector as a file that MMDetection and `load_detector` read.

    Args:
        model: a detector without background outputs whose backbone has the release formulation.
        path: output file, `.pth`.
        classes: class names.
    """
    body = model.backbone.body.config
    if model.detector.background_outputs or body.formulation != "release":
        raise ValueError("model: expected background_outputs=False and formulation='release', as MMDetection's models")
    contents = {"meta": {"CLASSES": classes}, "state_dict": mmdetection.restore(model.state_dict(), body)}
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    write_atomically(path, buffer.getbuffer())


def save_detector(model: PolylineMaskRCNN, path: Path, config: Any, classes: tuple[str, ...]) -> None:
    """Write a detector to our format.

    Args:
        model: the detector.
        path: output file, `.safetensors`.
        config: its `DetectionConfig` or `ScoringConfig`.
        classes: class names.
    """
    save_model(model, path, model.backbone.body, mmdetection.BODY, config, classes, task="detection")

"""Trained detectors from files."""

from pathlib import Path

from ppma.models import Checkpoint, PolylineBackbone, open_checkpoint
from ppma.tasks.dense.weights import load_model
from ppma.tasks.detection.config import DetectionConfig
from ppma.tasks.detection.model import PolylineMaskRCNN


def build(body: PolylineBackbone, config: DetectionConfig, classes: int) -> PolylineMaskRCNN:
    """The detector of a configuration, for so many classes beside the background."""
    return PolylineMaskRCNN(body, classes + 1, config.detector, config.data.mean, config.data.std)


def load_detector(path: str | Path | Checkpoint) -> tuple[PolylineMaskRCNN, DetectionConfig, tuple[str, ...]]:
    """A trained detector, in evaluation mode, with its configuration and its classes."""
    return load_model(open_checkpoint(path), "detection", DetectionConfig, build)

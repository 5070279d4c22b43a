"""The schema of detection's configuration files."""

from dataclasses import dataclass, field

from ppma.data.coco import CocoDataConfig
from ppma.data.coco_transforms import CocoAugmentConfig
from ppma.tasks.dense.config import DenseConfig
from ppma.tasks.detection.model import DetectorConfig


@dataclass(frozen=True, kw_only=True)
class DetectionConfig(DenseConfig):
    """Training of Mask R-CNN.

    Attributes:
        data: see `CocoDataConfig`.
        augment: see `CocoAugmentConfig`.
        detector: see `DetectorConfig`.
    """

    data: CocoDataConfig
    augment: CocoAugmentConfig = field(default_factory=CocoAugmentConfig)
    detector: DetectorConfig = field(default_factory=DetectorConfig)

"""The schema of detection recipes."""

from dataclasses import dataclass, field

from ppma.data.coco import CocoDataConfig
from ppma.data.coco_transforms import CocoAugmentConfig
from ppma.tasks.dense.config import DenseConfig
from ppma.tasks.detection.model import DetectorConfig


@dataclass(frozen=True, kw_only=True)
class DetectionConfig(DenseConfig):
    """A Mask R-CNN run.

    Attributes:
        data: where images and annotations are.
        augment: augmentation of training images.
        detector: the neck and the heads.
    """

    data: CocoDataConfig
    augment: CocoAugmentConfig = field(default_factory=CocoAugmentConfig)
    detector: DetectorConfig = field(default_factory=DetectorConfig)

"""Detection and instance segmentation: Mask R-CNN on data in COCO's layout."""

from ppma.tasks.detection.config import DetectorConfig
from ppma.tasks.detection.model import PolylineMaskRCNN, mask_rcnn

__all__ = ["DetectorConfig", "PolylineMaskRCNN", "mask_rcnn"]

"""The schema of detection recipes."""

from dataclasses import dataclass, field
from typing import Any, Literal

from ppma.config import require
from ppma.data.coco import CocoDataConfig
from ppma.data.coco_transforms import MAX_SIDE, CocoAugmentConfig
from ppma.tasks.dense.config import DenseConfig

_MAX_COUNT = 1 << 20  # of channels, regions or detections: far above any detector, below what exhausts memory
_MAX_CONVOLUTIONS = 1024


@dataclass(frozen=True)
class DetectorConfig:
    """The neck and the heads of Mask R-CNN, or of Faster R-CNN without masks.

    The defaults are torchvision's; `DetectorConfig.mmdetection()` is the detector of MMDetection 2.28, which the
    authors trained.

    Attributes:
        masks: predict masks (Mask R-CNN) or boxes only (Faster R-CNN); None for masks if the training data have any.
        channels: channels of the pyramid and of the mask head.
        box_channels: channels of the two linear layers of the box head.
        mask_convolutions: number of convolutions in the mask head.
        background_outputs: whether the box regression and the masks have outputs for the background, which nothing
            reads; torchvision has them, MMDetection does not.
        initial_weights: "mmdetection" draws those of the pyramid and the box head from Xavier's uniform distribution,
            those of the classifier with standard deviation 0.01 and of the box regression with 0.001; "torchvision"
            leaves them as its layers initialise them.
        anchor_sizes: side of the square anchor of each of the five levels, in pixels.
        exact_anchors: keep the corners of anchors unrounded and place them by the levels' strides; torchvision rounds
            corners to pixels and divides the size of the image by that of the level, which is 61 for stride 64 at
            800 pixels.
        padding_anchors: train on anchors in the padding that makes the images of a batch equally large.
        clip_shrinking: limit how much a box regression shrinks a region to a factor of 16 / 1000, as it limits growth
            to 1000 / 16; torchvision limits growth only.
        keep_tiny_boxes: keep detections of any size, and proposals with any positive size; torchvision drops
            proposals narrower than 0.001 pixels and detections narrower than 0.01.
        sampling_ratio: sampling points of a RoIAlign cell along each axis; 0 chooses them by the size of the region.
        aligned: shift regions by half a cell in RoIAlign, so that features are sampled at the centres of pixels.
        candidates_train: proposals of each level before NMS in training; None for `proposals_train`.
        candidates: proposals of each level before NMS in evaluation; None for `proposals`.
        proposals_train: proposals of an image after NMS in training.
        proposals: proposals of an image after NMS in evaluation.
        low_quality_iou: minimum IoU at which the best anchors of an object are positive although below 0.7; None for no
            minimum.
        region_samples: proposals of an image that the heads are trained on in each step.
        box_loss_beta: where the smooth L1 loss of box regressions changes from quadratic to linear; 0 for the L1 loss.
        binary_masks: align mask targets to the centres of pixels and round them to 0 or 1; torchvision does neither.
        short_side: length of the shorter side of images in evaluation.
        long_side: maximum length of the longer side; an image that would exceed it is scaled to it instead.
        resize: "torchvision" rounds scaled sizes down and interpolates normalised values; "mmdetection" rounds sizes to
            the nearest pixel and interpolated values to 8 bits, as OpenCV does.
        score_threshold: minimum score of a detection.
        detections: maximum number of detections of an image.
        mask_paste: how masks (28 x 28) are placed in the image: "torchvision" resizes a mask to its box in whole
            pixels, "mmdetection" samples it at the centre of every pixel of the image.
    """

    masks: bool | None = None
    channels: int = 256
    box_channels: int = 1024
    mask_convolutions: int = 4
    background_outputs: bool = True
    initial_weights: Literal["torchvision", "mmdetection"] = "torchvision"
    anchor_sizes: tuple[int, int, int, int, int] = (32, 64, 128, 256, 512)
    exact_anchors: bool = False
    padding_anchors: bool = True
    clip_shrinking: bool = False
    keep_tiny_boxes: bool = False
    sampling_ratio: int = 2
    aligned: bool = False
    candidates_train: int | None = None
    candidates: int | None = None
    proposals_train: int = 2000
    proposals: int = 1000
    low_quality_iou: float | None = None
    region_samples: int = 512
    box_loss_beta: float = 1 / 9
    binary_masks: bool = False
    short_side: int = 800
    long_side: int = 1333
    resize: Literal["torchvision", "mmdetection"] = "torchvision"
    score_threshold: float = 0.05
    detections: int = 100
    mask_paste: Literal["torchvision", "mmdetection"] = "torchvision"

    def __post_init__(self) -> None:
        counts = ("channels", "box_channels", "candidates_train", "candidates", "proposals_train", "proposals")
        for key in (*counts, "region_samples", "detections"):
            value = getattr(self, key)
            require(value is None or 1 <= value <= _MAX_COUNT, key, f"1 to {_MAX_COUNT}", value)
        convolutions, sides = self.mask_convolutions, self.anchor_sizes
        require(1 <= convolutions <= _MAX_CONVOLUTIONS, "mask_convolutions", f"1 to {_MAX_CONVOLUTIONS}", convolutions)
        require(0 <= self.sampling_ratio <= 64, "sampling_ratio", "0 to 64", self.sampling_ratio)
        least = self.low_quality_iou
        require(least is None or 0 <= least <= 1, "low_quality_iou", "a number from 0 to 1, or null", least)
        require(self.box_loss_beta >= 0, "box_loss_beta", "0 or more", self.box_loss_beta)
        require(0 <= self.score_threshold <= 1, "score_threshold", "a number from 0 to 1", self.score_threshold)
        require(1 <= self.long_side <= MAX_SIDE, "long_side", f"1 to {MAX_SIDE}", self.long_side)
        require(1 <= self.short_side <= self.long_side, "short_side", "1 to long_side", self.short_side)
        require(all(1 <= side <= MAX_SIDE for side in sides), "anchor_sizes", f"numbers from 1 to {MAX_SIDE}", sides)

    @classmethod
    def mmdetection(cls, **changes: Any) -> "DetectorConfig":
        """The detector of MMDetection 2.28 (`mask_rcnn_r50_fpn`), with changed fields.

        Examples:
            >>> DetectorConfig.mmdetection(channels=64).candidates_train
            2000
        """
        theirs: dict[str, Any] = {
            "background_outputs": False,
            "initial_weights": "mmdetection",
            "exact_anchors": True,
            "padding_anchors": False,
            "clip_shrinking": True,
            "keep_tiny_boxes": True,
            "sampling_ratio": 0,
            "aligned": True,
            "candidates_train": 2000,
            "candidates": 1000,
            "proposals_train": 1000,
            "proposals": 1000,
            "low_quality_iou": 0.3,
            "box_loss_beta": 0.0,
            "binary_masks": True,
            "resize": "mmdetection",
            "mask_paste": "mmdetection",
        }
        return cls(**{**theirs, **changes})


@dataclass(frozen=True)
class ScoringConfig:
    """How a trained detector is used: the parts of `DetectionConfig` that evaluation needs.

    Attributes:
        data: where images and annotations are, and how images are normalised.
        detector: the neck and the heads.
    """

    data: CocoDataConfig
    detector: DetectorConfig


@dataclass(frozen=True, kw_only=True)
class DetectionConfig(DenseConfig):
    """A Mask R-CNN or Faster R-CNN run.

    Attributes:
        data: where images and annotations are, and how images are normalised.
        augment: augmentation of training images.
        detector: the neck and the heads.
    """

    data: CocoDataConfig
    augment: CocoAugmentConfig = field(default_factory=CocoAugmentConfig)
    detector: DetectorConfig = field(default_factory=DetectorConfig)

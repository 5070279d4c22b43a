"""Mask R-CNN over our backbones: torchvision's detector with a pyramid of the four stages."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from ppma.config import require
from ppma.models import PolylineBackbone
from ppma.tasks.dense.backbone import (
    authors_without_weight_decay,
    dense_backbone,
    feature_channels,
    features,
    without_weight_decay,
)
from ppma.tasks.dense.cost import Cost, count

LEVELS = ("0", "1", "2", "3")  # the names torchvision gives to the stages; "pool" is the fifth level
BOX_GRID, MASK_GRID = 7, 14
ASPECT_RATIOS = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class DetectorConfig:
    """Mask R-CNN around a backbone; the defaults are torchvision's, which are the paper's but for what is said here.

    Attributes:
        channels: of the pyramid and of the mask head.
        box_channels: of the two linear layers of the box head.
        mask_convolutions: of the mask head.
        anchor_sizes: sides of the anchors in pixels, one for each of the five levels.
        sampling_ratio: points of a RoIAlign cell along each axis; 0 as many as its size asks (MMDetection's choice).
        proposals_train: regions that go on to the heads in training (MMDetection: 1000).
        proposals: the same in evaluation.
        region_samples: regions of an image of which the heads learn at each step.
        short_side: images are scaled to this shorter side in evaluation,
        long_side: or less, so that the longer side has at most this.
        score_threshold: detections below it are dropped.
        detections: how many are kept for an image.
    """

    channels: int = 256
    box_channels: int = 1024
    mask_convolutions: int = 4
    anchor_sizes: tuple[int, int, int, int, int] = (32, 64, 128, 256, 512)
    sampling_ratio: int = 2
    proposals_train: int = 2000
    proposals: int = 1000
    region_samples: int = 512
    short_side: int = 800
    long_side: int = 1333
    score_threshold: float = 0.05
    detections: int = 100

    def __post_init__(self) -> None:
        counts = ("channels", "box_channels", "mask_convolutions")
        for key in (*counts, "proposals_train", "proposals", "region_samples", "detections"):
            require(getattr(self, key) >= 1, key, "at least 1", getattr(self, key))
        require(self.mask_convolutions <= 1024, "mask_convolutions", "at most 1024", self.mask_convolutions)
        require(1 <= self.short_side <= self.long_side, "short_side", "1 to long_side", self.short_side)
        require(min(self.anchor_sizes) > 0, "anchor_sizes", "five numbers > 0", self.anchor_sizes)


class PyramidBackbone(nn.Module):
    """Images (B, 3, height, width) to five levels (B, channels, H, W), by name, finest first.

    Args:
        body: gives the four stages.
        channels: of every level.
    """

    def __init__(self, body: PolylineBackbone, channels: int) -> None:
        super().__init__()
        self.body = body
        self.fpn = FeaturePyramidNetwork(list(feature_channels(body)), channels, extra_blocks=LastLevelMaxPool())
        self.out_channels = channels

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.fpn(OrderedDict(zip(LEVELS, features(self.body, images), strict=True)))


class PolylineMaskRCNN(MaskRCNN):
    """torchvision's Mask R-CNN, which also tells the optimizer what takes no weight decay.

    In training, images come in the size that the augmentation gave them; in evaluation they are scaled here, and the
    detections are those of the images as they came.

    Args:
        body: gives the four stages.
        num_classes: the background included, as class 0.
        detector: see `DetectorConfig`.
        mean: of the channels of images in [0, 1].
        std: likewise.
    """

    def __init__(
        self,
        body: PolylineBackbone,
        num_classes: int,
        detector: DetectorConfig,
        mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN,
        std: tuple[float, ...] = IMAGENET_DEFAULT_STD,
    ) -> None:
        if num_classes < 2:
            raise ValueError(f"num_classes: expected at least 2, the background among them, got {num_classes}")
        channels = detector.channels
        super().__init__(
            PyramidBackbone(body, channels),
            min_size=detector.short_side,
            max_size=detector.long_side,
            image_mean=list(mean),
            image_std=list(std),
            rpn_anchor_generator=AnchorGenerator(
                tuple((size,) for size in detector.anchor_sizes), (ASPECT_RATIOS,) * len(detector.anchor_sizes)
            ),
            rpn_pre_nms_top_n_train=detector.proposals_train,
            rpn_pre_nms_top_n_test=detector.proposals,
            rpn_post_nms_top_n_train=detector.proposals_train,
            rpn_post_nms_top_n_test=detector.proposals,
            box_roi_pool=MultiScaleRoIAlign(list(LEVELS), BOX_GRID, detector.sampling_ratio),
            box_head=TwoMLPHead(channels * BOX_GRID**2, detector.box_channels),
            box_predictor=FastRCNNPredictor(detector.box_channels, num_classes),
            box_score_thresh=detector.score_threshold,
            box_batch_size_per_image=detector.region_samples,
            box_detections_per_img=detector.detections,
            mask_roi_pool=MultiScaleRoIAlign(list(LEVELS), MASK_GRID, detector.sampling_ratio),
            mask_head=MaskRCNNHeads(channels, (channels,) * detector.mask_convolutions, 1),
            mask_predictor=MaskRCNNPredictor(channels, channels, num_classes),
            _skip_resize=True,
        )

    def no_weight_decay(self) -> set[str]:
        """See `PolylineBackbone.no_weight_decay`."""
        return without_weight_decay(self.backbone.body, "backbone.body.")

    def authors_no_weight_decay(self) -> set[str]:
        """Names of the parameters that the authors' training excludes from weight decay."""
        return authors_without_weight_decay(self.backbone.body, "backbone.body.")


def mask_rcnn(
    backbone_name: str,
    num_classes: int = 81,
    *,
    detector: DetectorConfig | None = None,
    **backbone_kwargs: Any,
) -> PolylineMaskRCNN:
    """Mask R-CNN over a registered backbone.

    Args:
        backbone_name: such as "ppma_tiny".
        num_classes: the background included; COCO has 81.
        detector: see `DetectorConfig`.
        backbone_kwargs: fields of the backbone's configuration to change.

    Example:
        >>> import torch
        >>> from ppma.tasks.detection import DetectorConfig, mask_rcnn
        >>> model = mask_rcnn("ppma_nano", num_classes=11, detector=DetectorConfig(short_side=64)).eval()
        >>> (found,) = model([torch.rand(3, 64, 96)])
        >>> sorted(found)
        ['boxes', 'labels', 'masks', 'scores']
    """
    return PolylineMaskRCNN(dense_backbone(backbone_name, **backbone_kwargs), num_classes, detector or DetectorConfig())


def cost(
    model: PolylineMaskRCNN, size: tuple[int, int] = (800, 1280), *, proposals: int = 1000, masks: int = 100
) -> Cost:
    """Multiply-adds for one image, with as many regions as published figures count.

    Args:
        model: is left as it is.
        size: (height, width).
        proposals: regions of the box head.
        masks: regions of the mask head.
    """

    def run(shadow: PolylineMaskRCNN) -> None:
        levels = shadow.backbone(torch.empty(1, 3, *size, device="meta"))
        shadow.rpn.head(list(levels.values()))
        heads, channels = shadow.roi_heads, shadow.backbone.out_channels
        heads.box_predictor(heads.box_head(torch.empty(proposals, channels, BOX_GRID, BOX_GRID, device="meta")))
        heads.mask_predictor(heads.mask_head(torch.empty(masks, channels, MASK_GRID, MASK_GRID, device="meta")))

    return count(model, run)

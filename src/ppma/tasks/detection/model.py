"""Mask R-CNN with a polyline backbone: torchvision's detector on a feature pyramid of the four stages."""

from collections import OrderedDict
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from ppma.tasks.dense.backbone import (
    Backbone,
    authors_without_weight_decay,
    dense_backbone,
    feature_channels,
    features,
    without_weight_decay,
)
from ppma.tasks.dense.cost import Cost, count
from ppma.tasks.detection.config import DetectorConfig
from ppma.tasks.detection.regions import (
    ASPECT_RATIOS,
    ForegroundBoxPredictor,
    ForegroundMaskPredictor,
    LimitedMatcher,
    ProposalHead,
    ProposalNetwork,
    PyramidAnchors,
    PyramidRoIAlign,
    RegionHeads,
    SymmetricBoxCoder,
)
from ppma.tasks.detection.scaling import ImageScaling

LEVELS = ("0", "1", "2", "3")  # torchvision's names of the four stages; "pool" is the fifth level
BOX_GRID, MASK_GRID = 7, 14


class PyramidBackbone(nn.Module):
    """A backbone with a feature pyramid.

    Args:
        body: the backbone.
        channels: channels of every level.
    """

    def __init__(self, body: Backbone, channels: int) -> None:
        super().__init__()
        self.body = body
        self.fpn = FeaturePyramidNetwork(list(feature_channels(body)), channels, extra_blocks=LastLevelMaxPool())
        self.out_channels = channels

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Five levels (B, channels, H, W) by name, finest first, of images (B, 3, height, width)."""
        return self.fpn(OrderedDict(zip(LEVELS, features(self.body, images), strict=True)))


class PolylineMaskRCNN(GeneralizedRCNN):
    """Mask R-CNN with a polyline backbone.

    In training mode it takes images (3, H, W) in [0, 1], scaled by the augmentation, and targets, and returns losses.
    In evaluation mode it scales the images itself and returns boxes, labels, scores and masks in their coordinates.

    Args:
        body: the backbone.
        num_classes: number of classes, including the background as class 0.
        detector: the neck and the heads.
        mean: channel means of images in [0, 1].
        std: channel standard deviations of images in [0, 1].

    Attributes:
        detector: the configuration of the neck and the heads.
    """

    def __init__(
        self,
        body: Backbone,
        num_classes: int,
        detector: DetectorConfig,
        mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN,
        std: tuple[float, ...] = IMAGENET_DEFAULT_STD,
    ) -> None:
        if num_classes < 2:
            raise ValueError(f"num_classes: expected at least 2, the background among them, got {num_classes}")
        strides = [int(info["reduction"]) for info in body.feature_info]
        backbone = PyramidBackbone(body, detector.channels)
        heads = _region_heads(detector, num_classes, strides)
        rpn = _proposal_network(detector, (*strides, 2 * strides[-1]))
        if detector.clip_shrinking:
            rpn.box_coder, heads.box_coder = (SymmetricBoxCoder(part.box_coder.weights) for part in (rpn, heads))
        super().__init__(backbone, rpn, heads, ImageScaling(detector, mean, std))
        self.detector = detector
        if detector.initial_weights == "mmdetection":
            self._initialise()

    def _initialise(self) -> None:
        """Reset the weights that MMDetection starts differently from torchvision."""
        box_head, predictor = self.roi_heads.box_head, self.roi_heads.box_predictor
        convolutions = [layer for layer in self.backbone.fpn.modules() if isinstance(layer, nn.Conv2d)]
        for layer in (*convolutions, box_head.fc6, box_head.fc7):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        for layer, std in ((predictor.cls_score, 0.01), (predictor.bbox_pred, 0.001)):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)

    def no_weight_decay(self) -> set[str]:
        """See `PolylineBackbone.no_weight_decay`."""
        return without_weight_decay(self.backbone.body, "backbone.body.")

    def authors_no_weight_decay(self) -> set[str]:
        """Names of the parameters that the authors' training excludes from weight decay."""
        return authors_without_weight_decay(self.backbone.body, "backbone.body.")


def _proposal_network(detector: DetectorConfig, strides: tuple[int, ...]) -> ProposalNetwork:
    rpn = ProposalNetwork(
        anchor_generator=PyramidAnchors(detector.anchor_sizes, strides, exact=detector.exact_anchors),
        head=ProposalHead(detector.channels, len(ASPECT_RATIOS)),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=256,
        positive_fraction=0.5,
        pre_nms_top_n={
            "training": detector.candidates_train or detector.proposals_train,
            "testing": detector.candidates or detector.proposals,
        },
        post_nms_top_n={"training": detector.proposals_train, "testing": detector.proposals},
        nms_thresh=0.7,
        beta=detector.box_loss_beta,
        padding_anchors=detector.padding_anchors,
    )
    if detector.low_quality_iou is not None:
        rpn.proposal_matcher = LimitedMatcher(0.7, 0.3, least=detector.low_quality_iou)
    if detector.keep_tiny_boxes:
        rpn.min_size = torch.finfo(torch.float32).tiny  # any positive side
    return rpn


def _region_heads(detector: DetectorConfig, num_classes: int, strides: list[int]) -> RegionHeads:
    channels = detector.channels

    def pool(size: int) -> PyramidRoIAlign:
        return PyramidRoIAlign(LEVELS, strides, size, sampling_ratio=detector.sampling_ratio, aligned=detector.aligned)

    box_predictor, mask_predictor = (
        (FastRCNNPredictor, MaskRCNNPredictor)
        if detector.background_outputs
        else (ForegroundBoxPredictor, ForegroundMaskPredictor)
    )
    return RegionHeads(
        box_roi_pool=pool(BOX_GRID),
        box_head=TwoMLPHead(channels * BOX_GRID**2, detector.box_channels),
        box_predictor=box_predictor(detector.box_channels, num_classes),
        fg_iou_thresh=0.5,
        bg_iou_thresh=0.5,
        batch_size_per_image=detector.region_samples,
        positive_fraction=0.25,
        bbox_reg_weights=None,  # 10, 10, 5, 5: deltas have standard deviations 0.1, 0.1, 0.2, 0.2
        score_thresh=detector.score_threshold,
        nms_thresh=0.5,
        detections_per_img=detector.detections,
        mask_roi_pool=pool(MASK_GRID),
        mask_head=MaskRCNNHeads(channels, (channels,) * detector.mask_convolutions, 1),
        mask_predictor=mask_predictor(channels, channels, num_classes),
        beta=detector.box_loss_beta,
        binary_masks=detector.binary_masks,
        min_side=0.0 if detector.keep_tiny_boxes else 1e-2,
    )


def mask_rcnn(
    backbone_name: str,
    num_classes: int = 81,
    *,
    detector: DetectorConfig | None = None,
    **backbone_kwargs: Any,
) -> PolylineMaskRCNN:
    """Mask R-CNN with a registered backbone.

    Args:
        backbone_name: name of the backbone, such as "ppma_tiny".
        num_classes: number of classes including the background; 81 for COCO.
        detector: the neck and the heads; None for torchvision's.
        backbone_kwargs: fields of `BackboneConfig` to override.

    Examples:
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
    """Multiply-adds for one image, with the numbers of regions that published figures assume.

    Args:
        model: not modified.
        size: height and width of the image.
        proposals: number of regions in the box head.
        masks: number of regions in the mask head.
    """

    def run(shadow: PolylineMaskRCNN) -> None:
        levels = shadow.backbone(torch.empty(1, 3, *size, device="meta"))
        shadow.rpn.head(list(levels.values()))
        heads, channels = shadow.roi_heads, shadow.backbone.out_channels
        heads.box_predictor(heads.box_head(torch.empty(proposals, channels, BOX_GRID, BOX_GRID, device="meta")))
        heads.mask_predictor(heads.mask_head(torch.empty(masks, channels, MASK_GRID, MASK_GRID, device="meta")))

    return count(model, run)

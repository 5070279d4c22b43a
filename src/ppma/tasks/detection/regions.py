"""Regions of Mask R-CNN: anchors, RoIAlign, box regression and heads, with torchvision's or MMDetection's rules."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection._utils import BoxCoder, Matcher
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import batched_nms, clip_boxes_to_image, remove_small_boxes, roi_align

ASPECT_RATIOS = (0.5, 1.0, 2.0)  # height / width of anchors
_CELLS = 14  # regions of fewer cells of the finest level are pooled from it: 56 pixels for stride 4


def at_least_float32(x: Tensor) -> Tensor:
    """Undo autocast: bfloat16 has steps of 4 pixels at 1000 pixels."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class PyramidAnchors(AnchorGenerator):
    """Anchors of the levels of a pyramid, one size and `ASPECT_RATIOS` for each.

    Args:
        sizes: side of the square anchor of each level, in pixels.
        strides: stride of each level in pixels.
        exact: see `DetectorConfig.exact_anchors`.
    """

    def __init__(self, sizes: Sequence[int], strides: Sequence[int], *, exact: bool) -> None:
        self.strides, self.exact = strides, exact
        super().__init__([(size,) for size in sizes], [ASPECT_RATIOS] * len(sizes))

    def generate_anchors(self, scales: Sequence[int], aspect_ratios: Sequence[float], *_: Any) -> Tensor:
        """Anchors (ratios * scales, 4) around the origin."""
        height = torch.tensor(aspect_ratios, dtype=torch.float32, device="cpu").sqrt()
        sides = torch.tensor(scales, dtype=torch.float32, device="cpu")
        width, height = ((factor[:, None] * sides).flatten() for factor in (1 / height, height))
        anchors = torch.stack((-width, -height, width, height), 1) / 2
        return anchors if self.exact else anchors.round()

    def set_cell_anchors(self, dtype: torch.dtype, device: torch.device) -> None:
        super().set_cell_anchors(torch.promote_types(dtype, torch.float32), device)

    def grid_anchors(self, grid_sizes: list[list[int]], strides: list[list[Tensor]]) -> list[Tensor]:
        """Anchors of each level, (H * W * ratios, 4), row by row."""
        nominal = [[stride, stride] for stride in self.strides]
        return super().grid_anchors(grid_sizes, nominal if self.exact else strides)


class PyramidRoIAlign(nn.Module):
    """RoIAlign that pools each region from the level that fits its size.

    torchvision's `MultiScaleRoIAlign` infers the strides from the first image it sees and keeps them; a first image
    that is padded to several times its height makes them wrong.

    Args:
        levels: names of the levels, finest first.
        strides: stride of each level in pixels; each is twice the one before.
        size: height and width of the pooled features.
        sampling_ratio: see `DetectorConfig`.
        aligned: see `DetectorConfig`.
    """

    def __init__(
        self, levels: Sequence[str], strides: Sequence[int], size: int, *, sampling_ratio: int, aligned: bool
    ) -> None:
        super().__init__()
        self.levels, self.strides, self.size = levels, strides, size
        self.sampling_ratio, self.aligned = sampling_ratio, aligned

    def forward(self, features: Mapping[str, Tensor], boxes: list[Tensor], _: Any = None) -> Tensor:
        """Features (regions, C, size, size) of boxes (n, 4) of each image, in pixels of the padded images."""
        maps = [features[level] for level in self.levels]
        regions = torch.cat([F.pad(of_image, (1, 0), value=index) for index, of_image in enumerate(boxes)])
        side = ((regions[:, 3] - regions[:, 1]) * (regions[:, 4] - regions[:, 2])).sqrt()
        levels = (side / (_CELLS * self.strides[0]) + 1e-6).log2().floor().clamp(0, len(maps) - 1)
        pooled = maps[0].new_zeros(len(regions), maps[0].shape[1], self.size, self.size)
        for level, (features_of_level, stride) in enumerate(zip(maps, self.strides, strict=True)):
            inside = torch.where(levels == level)[0]
            aligned = roi_align(
                features_of_level, regions[inside], self.size, 1 / stride, self.sampling_ratio, self.aligned
            )
            pooled[inside] = aligned.to(pooled.dtype)  # autocast may give levels different types
        return pooled


class SymmetricBoxCoder(BoxCoder):
    """Box regression that limits shrinking as it limits growth."""

    def decode_single(self, rel_codes: Tensor, boxes: Tensor) -> Tensor:
        least = [-math.inf, -math.inf, *(-weight * self.bbox_xform_clip for weight in self.weights[2:])]
        limited = rel_codes.unflatten(1, (-1, 4)).maximum(rel_codes.new_tensor(least))
        return super().decode_single(limited.flatten(1), boxes)


class LimitedMatcher(Matcher):
    """Assigns anchors to objects; the best anchors of an object count only if they overlap it enough.

    Args:
        least: minimum IoU of an object's best anchors, where none reaches the usual threshold.
        arguments: see torchvision's `Matcher`.
    """

    def __init__(self, *arguments: Any, least: float) -> None:
        super().__init__(*arguments, allow_low_quality_matches=True)
        self.least = least

    def set_low_quality_matches_(self, matches: Tensor, all_matches: Tensor, match_quality_matrix: Tensor) -> None:
        best = match_quality_matrix.amax(1)
        for index in torch.where(best >= self.least)[0].tolist():
            matches[match_quality_matrix[index] == best[index]] = index


class ForegroundBoxPredictor(FastRCNNPredictor):
    """A box predictor without regression of the background; its place is filled with zeros.

    Args:
        channels: channels of the box features.
        num_classes: number of classes, the background included.
    """

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__(channels, num_classes)
        self.bbox_pred = nn.Linear(channels, 4 * (num_classes - 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n, channels) to logits (n, num_classes) and deltas (n, 4 * num_classes)."""
        logits, deltas = super().forward(x)
        return logits, F.pad(deltas, (4, 0))


class ForegroundMaskPredictor(MaskRCNNPredictor):
    """A mask predictor without a mask of the background; its place is filled with zeros.

    Args:
        channels: channels of the mask features.
        hidden: channels of the enlarged features.
        num_classes: number of classes, the background included.
    """

    def __init__(self, channels: int, hidden: int, num_classes: int) -> None:
        super().__init__(channels, hidden, num_classes - 1)

    def forward(self, x: Tensor) -> Tensor:
        """Features (n, channels, H, W) to logits (n, num_classes, 2 H, 2 W)."""
        return F.pad(super().forward(x), (0, 0, 0, 0, 1, 0))


class ProposalHead(RPNHead):
    """torchvision's head of the proposal network; outputs are float32 under autocast."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        logits, deltas = super().forward(x)
        return [at_least_float32(level) for level in logits], [at_least_float32(level) for level in deltas]


def _inside(anchors: Tensor, size: tuple[int, int]) -> Tensor:
    """Which anchors (n, 4) have their centre in an image of this height and width, padded to a multiple of 32."""
    height, width = (-(-side // 32) * 32 for side in size)
    centres = (anchors[:, :2] + anchors[:, 2:]) / 2
    return (centres < centres.new_tensor((width, height)) - 0.5).all(1)  # centres are whole, but for rounding


class ProposalNetwork(RegionProposalNetwork):
    """torchvision's region proposal network with a configurable loss.

    Args:
        beta: where the box loss changes from quadratic to linear; 0 for the L1 loss.
        padding_anchors: see `DetectorConfig`.
        arguments: see `RegionProposalNetwork`.
    """

    def __init__(self, *, beta: float, padding_anchors: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.beta, self.padding_anchors = beta, padding_anchors
        self.image_sizes: list[tuple[int, int]] = []  # of the images of the batch, before padding

    def forward(
        self, images: ImageList, features: dict[str, Tensor], targets: list[dict[str, Tensor]] | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Proposals of each image, and losses in training mode."""
        self.image_sizes = images.image_sizes
        return super().forward(images, features, targets)

    def assign_targets_to_anchors(
        self, anchors: list[Tensor], targets: list[dict[str, Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Labels (1 object, 0 background, -1 neither) and boxes to learn, for the anchors of each image."""
        if self.padding_anchors:
            return super().assign_targets_to_anchors(anchors, targets)
        chosen = [_inside(of_image, size) for of_image, size in zip(anchors, self.image_sizes, strict=True)]
        found = super().assign_targets_to_anchors([a[i] for a, i in zip(anchors, chosen, strict=True)], targets)
        labels, boxes = [a.new_full((len(a),), -1) for a in anchors], [torch.zeros_like(a) for a in anchors]
        for index, inside in enumerate(chosen):
            labels[index][inside], boxes[index][inside] = found[0][index], found[1][index]
        return labels, boxes

    def compute_loss(
        self, objectness: Tensor, pred_bbox_deltas: Tensor, labels: list[Tensor], regression_targets: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The losses of objectness and box regression, means over the sampled anchors."""
        positive, negative = (torch.where(torch.cat(chosen))[0] for chosen in self.fg_bg_sampler(labels))
        sampled, targets = torch.cat((positive, negative)), torch.cat(regression_targets)
        boxes = F.smooth_l1_loss(pred_bbox_deltas[positive], targets[positive], beta=self.beta, reduction="sum")
        scores = F.binary_cross_entropy_with_logits(objectness.flatten()[sampled], torch.cat(labels)[sampled])
        return scores, boxes / sampled.numel()


class RegionHeads(RoIHeads):
    """torchvision's box and mask heads with configurable losses and minimum size of detections.

    Args:
        beta: where the box loss changes from quadratic to linear; 0 for the L1 loss.
        binary_masks: whether target masks are aligned and binary.
        min_side: detections narrower than this are dropped, in pixels.
        arguments: see `RoIHeads`.
    """

    def __init__(self, *, beta: float, binary_masks: bool, min_side: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.beta, self.binary_masks, self.min_side = beta, binary_masks, min_side

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Detections of each image in evaluation mode, losses in training mode."""
        if not self.training:
            return super().forward(features, proposals, image_shapes, targets)
        proposals, matched, labels, deltas = self.select_training_samples(proposals, targets)
        logits, regression = self.box_predictor(self.box_head(self.box_roi_pool(features, proposals, image_shapes)))
        label, delta = torch.cat(labels), torch.cat(deltas)
        positive = torch.where(label > 0)[0]
        regression = regression.unflatten(1, (-1, 4))[positive, label[positive]]
        boxes = F.smooth_l1_loss(regression, delta[positive], beta=self.beta, reduction="sum") / label.numel()
        inside = [torch.where(of_image > 0)[0] for of_image in labels]
        regions, matched = (
            [values[i] for values, i in zip(all_, inside, strict=True)] for all_ in (proposals, matched)
        )
        losses = {"loss_classifier": F.cross_entropy(logits, label), "loss_box_reg": boxes}
        if not self.has_mask():
            return [], losses
        masks = self.mask_predictor(self.mask_head(self.mask_roi_pool(features, regions, image_shapes)))
        outlines = [target["masks"] for target in targets or ()]
        return [], {**losses, "loss_mask": self._mask_loss(masks, regions, outlines, matched, label)}

    def _mask_loss(
        self, logits: Tensor, regions: list[Tensor], masks: list[Tensor], matched: list[Tensor], label: Tensor
    ) -> Tensor:
        """Binary cross-entropy of the masks (n, classes, M, M) of the regions' own classes."""
        if not len(logits):
            return logits.sum() * 0
        boxes = (torch.cat((index[:, None].to(box), box), 1) for index, box in zip(matched, regions, strict=True))
        size = logits.shape[-1]
        targets = torch.cat(
            [
                roi_align(mask[:, None].to(box), box, size, 1.0, aligned=self.binary_masks)[:, 0]
                for mask, box in zip(masks, boxes, strict=True)
            ]
        )
        if self.binary_masks:
            targets = (targets >= 0.5).to(targets)
        own = logits[torch.arange(len(logits), device=logits.device), label[label > 0]]
        return F.binary_cross_entropy_with_logits(own, targets)

    def postprocess_detections(
        self,
        class_logits: Tensor,
        box_regression: Tensor,
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Boxes (n, 4), scores (n,) and labels (n,) of each image, best first."""
        counts = [len(of_image) for of_image in proposals]
        class_logits, box_regression = at_least_float32(class_logits), at_least_float32(box_regression)
        decoded = self.box_coder.decode(box_regression, proposals).reshape(*class_logits.shape, 4)
        detections: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        for boxes, scores, shape in zip(
            decoded.split(counts), class_logits.softmax(-1).split(counts), image_shapes, strict=True
        ):
            region, label = torch.where(scores[:, 1:] > self.score_thresh)
            label = label + 1  # 0 is the background
            found = clip_boxes_to_image(boxes[region, label], shape), scores[region, label], label
            large = remove_small_boxes(found[0], self.min_side)
            found = found[0][large], found[1][large], found[2][large]
            kept = batched_nms(*found, self.nms_thresh)[: self.detections_per_img]
            for results, values in zip(detections, found, strict=True):
                results.append(values[kept])
        return detections

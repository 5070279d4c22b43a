"""Images to the size that a detector takes, and its masks to the size of the image."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from ppma.tasks.detection.config import DetectorConfig


class ImageScaling(GeneralizedRCNNTransform):
    """Normalises and scales images, and returns detections to the coordinates of the original images.

    Training images have been scaled by the augmentation and are only normalised.

    Args:
        detector: `short_side`, `long_side`, `resize` and `mask_paste` are used.
        mean: channel means of images in [0, 1].
        std: channel standard deviations of images in [0, 1].
    """

    def __init__(self, detector: DetectorConfig, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(detector.short_side, detector.long_side, list(mean), list(std), _skip_resize=True)
        self.detector = detector

    def normalize(self, image: Tensor) -> Tensor:
        if self.detector.resize == "mmdetection" and not self.training:
            image = resize_8bit(image, self.detector.short_side, self.detector.long_side)
        return super().normalize(image)

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, Any]:
        if self.detector.resize == "mmdetection":  # done by `normalize`: 8-bit values are those before it
            return image, target
        return super().resize(image, target)

    def postprocess(
        self,
        result: list[dict[str, Tensor]],
        image_shapes: list[tuple[int, int]],
        original_image_sizes: list[tuple[int, int]],
    ) -> list[dict[str, Tensor]]:
        if self.training or self.detector.mask_paste == "torchvision":
            return super().postprocess(result, image_shapes, original_image_sizes)
        for found, scaled, original in zip(result, image_shapes, original_image_sizes, strict=True):
            down, right = (length / before for length, before in zip(original, scaled, strict=True))
            found["boxes"] = found["boxes"] * found["boxes"].new_tensor((right, down, right, down))
            if "masks" in found:
                found["masks"] = paste_masks(found["masks"], found["boxes"], original)
        return result


def resize_8bit(image: Tensor, short_side: int, long_side: int) -> Tensor:
    """Scale an image as MMDetection does with OpenCV: bilinear without antialiasing, rounded to 8 bits.

    Args:
        image: (3, H, W) in [0, 1].
        short_side: length of the shorter side.
        long_side: maximum length of the longer side.
    """
    height, width = image.shape[-2:]
    scale = min(short_side / min(height, width), long_side / max(height, width))
    size = [max(1, int(side * scale + 0.5)) for side in (height, width)]
    scaled = F.interpolate((255 * image[None]).round(), size, mode="bilinear", align_corners=False)[0]
    return (scaled + 0.5).floor() / 255


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Sample masks at the centres of the pixels of an image, as MMDetection does.

    Args:
        masks: (n, 1, M, M), probabilities in the frames of the boxes.
        boxes: (n, 4), left, top, right, bottom in pixels of the image.
        size: height and width of the image.

    Returns:
        Probabilities (n, 1, height, width), 0 outside of the boxes.
    """
    height, width = size
    pasted = boxes.new_zeros(len(masks), 1, height, width)
    for target, mask, box in zip(pasted, masks, boxes, strict=True):
        left, top = (box[:2].floor() - 1).clamp(min=0).int().tolist()
        right, bottom = (box[2:].ceil() + 1).int().tolist()
        window = target[:, top:bottom, left:right]
        rows, columns = (
            torch.arange(first, first + length, dtype=boxes.dtype, device=boxes.device) + 0.5
            for first, length in zip((top, left), window.shape[1:], strict=True)
        )
        x = 2 * (columns - box[0]) / (box[2] - box[0]) - 1
        y = 2 * (rows - box[1]) / (box[3] - box[1]) - 1
        # boxes without area: MMDetection samples the centre of the mask
        x, y = (axis.nan_to_num(0, 0, 0) for axis in (x, y))
        grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)
        window.copy_(F.grid_sample(mask[None].to(boxes), grid[None], align_corners=False)[0])
    return pasted

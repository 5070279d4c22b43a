"""Inference on whole images: at once or by sliding windows, at one or several scales, with or without flips."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppma.config import require
from ppma.data.segmentation import MAX_SIDE, SegmentationDataConfig


@dataclass(frozen=True)
class InferenceConfig:
    """How images are segmented in evaluation.

    Attributes:
        mode: "whole" images, or "slide" windows over them and average the logits where windows overlap.
        window: side of a window.
        stride: distance from one window to the next.
        scales: factors on the resized size; the probabilities are averaged.
        flip: average with the probabilities of the horizontally flipped image.
    """

    mode: Literal["whole", "slide"] = "whole"
    window: int = 512
    stride: int = 341
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False

    def __post_init__(self) -> None:
        require(self.window <= MAX_SIDE, "window", f"at most {MAX_SIDE}", self.window)
        require(1 <= self.stride <= self.window, "stride", "1 to window", self.stride)
        require(min(self.scales, default=0) > 0, "scales", "numbers > 0", self.scales)
        require(len(self.scales) <= 64, "scales", "at most 64 numbers", len(self.scales))


def window_starts(length: int, window: int, stride: int) -> list[int]:
    """Where windows start along one side so that they cover it; the last one is moved back to end with it."""
    count = -(-max(length - window, 0) // stride) + 1
    return [min(index * stride, max(length - window, 0)) for index in range(count)]


def slide(model: nn.Module, images: Tensor, window: int, stride: int) -> Tensor:
    """Logits (B, classes, H, W) of images (B, 3, H, W), averaged over windows."""
    height, width = images.shape[-2:]
    total: Tensor | None = None
    times = images.new_zeros(height, width)
    for top in window_starts(height, window, stride):
        for left in window_starts(width, window, stride):
            part = (..., slice(top, top + window), slice(left, left + window))
            scores = model(images[part]).main.float()
            if total is None:
                total = scores.new_zeros(*scores.shape[:2], height, width)
            total[part] += scores
            times[part] += 1
    assert total is not None
    return total / times


def probabilities(model: nn.Module, image: Tensor, data: SegmentationDataConfig, test: InferenceConfig) -> Tensor:
    """Class probabilities (classes, H, W) of the pixels of one image.

    Args:
        model: in evaluation mode.
        image: (3, H, W), float32 in [0, 1], at its original size.
        data: how it is resized and normalised.
        test: see `InferenceConfig`.
    """
    mean, std = (torch.tensor(values, device=image.device)[:, None, None] for values in (data.mean, data.std))
    normalised = ((image - mean) / std)[None]
    total: Tensor | None = None
    for scale in test.scales:
        size = data.scaled(image.shape[-2], image.shape[-1], scale)
        resized = normalised
        if size != tuple(image.shape[-2:]):
            resized = F.interpolate(normalised, size, mode="bilinear", antialias=data.antialias)
        for flipped in (False, True) if test.flip else (False,):
            scores = _score(model, resized.flip(-1) if flipped else resized, test)
            scores = F.interpolate(scores, image.shape[-2:], mode="bilinear", align_corners=False).softmax(1)[0]
            scores = scores.flip(-1) if flipped else scores
            total = scores if total is None else total + scores
    assert total is not None
    return total / (len(test.scales) * (2 if test.flip else 1))


def _score(model: nn.Module, images: Tensor, test: InferenceConfig) -> Tensor:
    if test.mode == "slide":
        return slide(model, images, test.window, test.stride)
    return model(images).main.float()

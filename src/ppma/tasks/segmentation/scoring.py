"""How a trained model scores the pixels of an image: whole or by windows, at one scale or several, mirrored or not."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppma.config import require
from ppma.data.ade20k import Ade20kDataConfig


@dataclass(frozen=True)
class InferenceConfig:
    """How images are scored in evaluation.

    Attributes:
        mode: the whole image at once, or windows that slide over it, their scores averaged where they overlap.
        window: side of a window.
        stride: from one window to the next.
        scales: factors on the scaled size; the probabilities are averaged.
        flip: average with the mirrored image's too.
    """

    mode: Literal["whole", "slide"] = "whole"
    window: int = 512
    stride: int = 341
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False

    def __post_init__(self) -> None:
        require(1 <= self.stride <= self.window, "stride", "1 to window", self.stride)
        require(min(self.scales, default=0) > 0, "scales", "numbers > 0", self.scales)


def window_starts(length: int, window: int, stride: int) -> list[int]:
    """Where windows begin so that they cover the whole length; the last one ends with it."""
    count = -(-max(length - window, 0) // stride) + 1
    return [min(index * stride, max(length - window, 0)) for index in range(count)]


def slide(model: nn.Module, images: Tensor, window: int, stride: int) -> Tensor:
    """Scores (B, classes, H, W) of images (B, 3, H, W), averaged over windows."""
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


def probabilities(model: nn.Module, image: Tensor, data: Ade20kDataConfig, test: InferenceConfig) -> Tensor:
    """Probabilities (classes, H, W) for the pixels of one image.

    Args:
        model: in evaluation mode.
        image: (3, H, W) in [0, 1], as it came.
        data: says how it is scaled and normalised.
        test: see `InferenceConfig`.
    """
    mean, std = (torch.tensor(values, device=image.device)[:, None, None] for values in (data.mean, data.std))
    normal = ((image - mean) / std)[None]
    total: Tensor | None = None
    for scale in test.scales:
        size = data.scaled(image.shape[-2], image.shape[-1], scale)
        scaled = normal
        if size != tuple(image.shape[-2:]):
            scaled = F.interpolate(normal, size, mode="bilinear", antialias=True)
        for mirrored in (False, True) if test.flip else (False,):
            scores = _score(model, scaled.flip(-1) if mirrored else scaled, test)
            scores = F.interpolate(scores, image.shape[-2:], mode="bilinear", align_corners=False).softmax(1)[0]
            scores = scores.flip(-1) if mirrored else scores
            total = scores if total is None else total + scores
    assert total is not None
    return total / (len(test.scales) * (2 if test.flip else 1))


def _score(model: nn.Module, images: Tensor, test: InferenceConfig) -> Tensor:
    if test.mode == "slide":
        return slide(model, images, test.window, test.stride)
    return model(images).main.float()

"""Effective receptive field: the influence of each pixel on the central features."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppma.explore import style
from ppma.models import PolylineBackbone
from ppma.progress import track

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECADES = 4  # range of the logarithmic colour scale


def effective_receptive_field(model: PolylineBackbone, images: Tensor, stage: int = 3) -> Tensor:
    """Mean absolute gradient of the central token's features with respect to the pixels.

    Args:
        model: in evaluation mode.
        images: (B, 3, height, width), normalised; more images give a smoother field.
        stage: 0-based stage of the features.

    Returns:
        (height, width), averaged over images and channels and scaled to a maximum of 1.
    """
    if not 0 <= stage < len(model.stages):
        raise ValueError(f"stage: expected 0 to {len(model.stages) - 1}, got {stage}")
    total = images.new_zeros(images.shape[-2:])
    for image in track(images.split(1), "receptive field"):
        pixels = image.detach().clone().requires_grad_()
        features = model.forward_intermediates(pixels, indices=[stage], stop_early=True, intermediates_only=True)
        feature = features[0]
        assert isinstance(feature, Tensor)
        middle = feature[0, :, feature.shape[2] // 2, feature.shape[3] // 2]
        (gradient,) = torch.autograd.grad(middle.sum(), pixels)
        total += gradient[0].abs().mean(0)
    return total / total.max().clamp_min(torch.finfo(total.dtype).tiny)


def noise_images(count: int, size: int, *, seed: int = 0) -> Tensor:
    """Gaussian noise images, (count, 3, size, size)."""
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def covering_side(field: Tensor, share: float = 0.5) -> float:
    """Side of the smallest centred square that holds this share of the field, relative to the image."""
    H, W = field.shape
    for half in range(1, H // 2):
        wide = max(1, half * W // H)
        inside = field[H // 2 - half : H // 2 + half, W // 2 - wide : W // 2 + wide]
        if inside.sum() >= share * field.sum():
            return 2 * half / H
    return 1.0


def receptive_field_figure(fields: Mapping[str, Tensor]) -> "Figure":
    """Draw receptive fields on one logarithmic colour scale.

    Below each is the side of the centred square that holds half of it, relative to the image.

    Args:
        fields: name -> (height, width), from `effective_receptive_field`.
    """
    figure = style.new_figure(min(style.PAGE, 0.8 + 2.3 * len(fields)), 2.5)
    axes = figure.subplots(1, len(fields), squeeze=False)[0]
    for axis, (name, field) in zip(axes, fields.items(), strict=True):
        smallest = torch.tensor(10.0**-DECADES, dtype=field.dtype)
        drawn = style.heatmap(axis, field.maximum(smallest).log10(), name, limits=(-DECADES, 0))
        axis.set_xlabel(f"half in {covering_side(field):.0%}", fontsize=style.SMALL, labelpad=3)
    bar = style.colour_bar(figure, drawn, axes, "influence of a pixel")
    bar.set_ticks(range(-DECADES, 1), labels=[f"$10^{{{power}}}$" if power else "1" for power in range(-DECADES, 1)])
    return figure

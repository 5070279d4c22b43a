"""Effective receptive field: how much each pixel moves the features in the middle of the image."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppma.explore import style
from ppma.models import PolylineBackbone

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECADES = 4  # of contributions that the colour scale spans


def effective_receptive_field(model: PolylineBackbone, images: Tensor, stage: int = 3) -> Tensor:
    """The gradient of the middle token's features with respect to the pixels, in absolute value, averaged.

    Args:
        model: in evaluation mode.
        images: (B, 3, height, width), normalised; the more, the smoother the field.
        stage: whose features, counted from 0.

    Returns:
        (height, width), the mean over images and channels; the largest is 1.
    """
    if not 0 <= stage < len(model.stages):
        raise ValueError(f"stage: expected 0 to {len(model.stages) - 1}, got {stage}")
    total = images.new_zeros(images.shape[-2:])
    for image in images.split(1):
        pixels = image.detach().clone().requires_grad_()
        features = model.forward_intermediates(pixels, indices=[stage], stop_early=True, intermediates_only=True)
        feature = features[0]
        assert isinstance(feature, Tensor)
        middle = feature[0, :, feature.shape[2] // 2, feature.shape[3] // 2]
        (gradient,) = torch.autograd.grad(middle.sum(), pixels)
        total += gradient[0].abs().mean(0)
    return total / total.max().clamp_min(torch.finfo(total.dtype).tiny)


def noise_images(count: int, size: int, *, seed: int = 0) -> Tensor:
    """Images of normal noise, (count, 3, size, size)."""
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def covered(field: Tensor, share: float = 0.5) -> float:
    """Side of the smallest centred square with this share of the field, relative to the image."""
    H, W = field.shape
    for half in range(1, H // 2):
        wide = max(1, half * W // H)
        inside = field[H // 2 - half : H // 2 + half, W // 2 - wide : W // 2 + wide]
        if inside.sum() >= share * field.sum():
            return 2 * half / H
    return 1.0


def receptive_field_figure(fields: Mapping[str, Tensor]) -> "Figure":
    """Receptive fields side by side on one logarithmic colour scale; titles say how wide half of each is.

    Args:
        fields: name -> (height, width), from `effective_receptive_field`.
    """
    figure = style.new_figure(1.0 + 2.5 * len(fields), 3.0)
    axes = figure.subplots(1, len(fields), squeeze=False)[0]
    for axis, (name, field) in zip(axes, fields.items(), strict=True):
        smallest = torch.tensor(10.0**-DECADES, dtype=field.dtype)
        title = f"{name}\nhalf within {covered(field):.0%} of the side"
        drawn = style.heat(axis, field.maximum(smallest).log10(), title, limits=(-DECADES, 0))
    bar = figure.colorbar(drawn, ax=list(axes), shrink=0.8, label="contribution of a pixel")
    bar.set_ticks(range(-DECADES, 1), labels=[f"$10^{{{power}}}$" if power else "1" for power in range(-DECADES, 1)])
    return figure

"""MMSegmentation's distortion of colours, on 8-bit images."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

BRIGHTNESS = (-32.0, 32.0)  # added
CONTRAST = SATURATION = (0.5, 1.5)  # factors
HUE = (-18, 18)  # added, of 180; the upper end is excluded, as there

Change = Callable[[Tensor, float], Tensor]


class PhotometricDistortion(v2.Transform):
    """Change brightness, contrast, saturation and hue, each with probability 1/2.

    Contrast is changed before or after saturation and hue, with equal probability. Each change is clipped and truncated
    to bytes; saturation and hue are changed in 8-bit HSV with hues of 0 to 179, as OpenCV has it. Takes images
    (3, H, W), uint8.

    `torchvision.transforms.v2.RandomPhotometricDistort` differs: it also permutes channels, multiplies brightness and
    has other ranges.
    """

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        changes: list[tuple[Change, float]] = [
            (add_brightness, _uniform(*BRIGHTNESS)),
            (scale_saturation, _uniform(*SATURATION)),
            (shift_hue, int(torch.randint(*HUE, ()))),
        ]
        changes.insert(1 if _coin() else 3, (scale_contrast, _uniform(*CONTRAST)))
        return {"changes": [change for change in changes if _coin()]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        if not isinstance(inpt, tv_tensors.Image):
            return inpt
        image = inpt.as_subclass(Tensor)
        for change, amount in params["changes"]:
            image = change(image, amount)
        return tv_tensors.Image(image)


def add_brightness(image: Tensor, amount: float) -> Tensor:
    """Add `amount` to every value."""
    return _to_bytes(image + amount)


def scale_contrast(image: Tensor, factor: float) -> Tensor:
    """Multiply every value by `factor`."""
    return _to_bytes(image * factor)


def scale_saturation(image: Tensor, factor: float) -> Tensor:
    """Multiply the saturation by `factor`."""
    hue, saturation, value = rgb_to_hsv(image)
    return hsv_to_rgb(hue, _to_bytes(saturation * factor).int(), value)


def shift_hue(image: Tensor, amount: float) -> Tensor:
    """Add `amount` of 180 to the hue."""
    hue, saturation, value = rgb_to_hsv(image)
    return hsv_to_rgb((hue + int(amount)) % 180, saturation, value)


def rgb_to_hsv(image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """RGB (3, H, W), uint8, to hue 0 to 179, saturation and value 0 to 255, each (H, W), int32."""
    red, green, blue = image.int()
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    sector = torch.where(value == green, blue - red + 2 * chroma, red - green + 4 * chroma)
    sector = torch.where(value == red, green - blue, sector)
    return _quotient(30, sector, chroma) % 180, _quotient(255, chroma, value), value


def hsv_to_rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """The inverse of `rgb_to_hsv`: (3, H, W), uint8."""
    full = 30 * 255
    sector, rest = hue // 30, hue % 30
    low = value * (255 - saturation) // 255
    falling = value * (full - saturation * rest) // full
    rising = value * (full - saturation * (30 - rest)) // full
    channels = (  # in the six sectors from red over yellow, green, cyan, blue and magenta
        (value, falling, low, low, rising, value),
        (rising, value, value, falling, low, low),
        (low, low, rising, value, value, falling),
    )
    chosen = sector.long()[None]
    return torch.stack([torch.stack(choices).gather(0, chosen)[0] for choices in channels]).to(torch.uint8)


def _quotient(scale: int, numerator: Tensor, denominator: Tensor) -> Tensor:
    """`scale * numerator / denominator` by a 12-bit reciprocal, as OpenCV computes it; 0 where the denominator is 0."""
    reciprocal = ((scale << 12) / denominator.clamp(min=1).double()).round().int()
    return (numerator * reciprocal + (1 << 11)) >> 12


def _to_bytes(image: Tensor) -> Tensor:
    return image.clamp(0, 255).to(torch.uint8)


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))


def _coin() -> bool:
    return bool(torch.rand(()) < 0.5)

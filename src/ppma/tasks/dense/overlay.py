"""Drawing predictions on images."""

import colorsys
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

_GOLDEN = 0.618034  # golden ratio: successive hues are far apart
_LEAST_SIDE = 256  # smaller images are enlarged to make labels readable
_ROW = 16


def colour_of(label: int) -> tuple[int, int, int]:
    """The RGB colour of a label; colours of consecutive labels are easy to tell apart."""
    red, green, blue = colorsys.hsv_to_rgb(label * _GOLDEN % 1, 0.85, 1.0 - 0.35 * (label // 8 % 2))
    return round(255 * red), round(255 * green), round(255 * blue)


def enlargement(image: Image.Image) -> int:
    """The integer factor by which a small image is enlarged before drawing."""
    return max(1, -(-_LEAST_SIDE // max(image.size)))


def _enlarged(image: Image.Image) -> Tensor:
    factor = enlargement(image)
    larger = image.resize((image.width * factor, image.height * factor), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(larger)).permute(2, 0, 1)


def draw_instances(
    image: Image.Image, boxes: Tensor, masks: Tensor, labels: Sequence[int], texts: Sequence[str]
) -> Image.Image:
    """Draw boxes, masks and captions.

    Args:
        image: RGB.
        boxes: (n, 4), left, top, right, bottom in pixels.
        masks: (n, H, W), bool.
        labels: n class labels, which select the colours.
        texts: n captions.
    """
    canvas, factor = _enlarged(image), enlargement(image)
    colours: list = [colour_of(label) for label in labels]
    if len(boxes):
        larger = masks.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
        canvas = draw_segmentation_masks(canvas, larger, alpha=0.45, colors=colours)
        canvas = draw_bounding_boxes(canvas, boxes * factor, colors=colours, width=2)
    picture = Image.fromarray(canvas.permute(1, 2, 0).numpy())
    draw = ImageDraw.Draw(picture)
    for box, text, colour in zip((boxes * factor).tolist(), texts, colours, strict=True):
        _write(draw, (box[0], box[1]), text, colour)
    return picture


def _write(draw: ImageDraw.ImageDraw, corner: tuple[float, float], text: str, colour: tuple[int, int, int]) -> None:
    """Draw a caption above the top left corner of a box, or inside the box at the top edge of the image."""
    left, top = corner[0], corner[1] - _ROW if corner[1] >= _ROW else corner[1]
    draw.rectangle((left, top, left + draw.textlength(text) + 6, top + _ROW - 2), fill=colour)
    dark = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] < 128
    draw.text((left + 3, top + 2), text, fill="white" if dark else "black")


def draw_classes(
    image: Image.Image,
    labels: Tensor,
    classes: Sequence[str],
    palette: Sequence[tuple[int, int, int]] | None = None,
) -> Image.Image:
    """Colour every pixel by its class and add a legend of the classes that occur.

    Args:
        image: RGB.
        labels: (H, W), indices into `classes`.
        classes: class names.
        palette: RGB colours of the classes, None for generated ones.
    """
    canvas, factor = _enlarged(image), enlargement(image)
    shown, pixels = labels.unique(return_counts=True)
    larger = labels.repeat_interleave(factor, 0).repeat_interleave(factor, 1)
    chosen: list = [palette[label] if palette else colour_of(label) for label in shown.tolist()]
    canvas = draw_segmentation_masks(canvas, larger[None] == shown[:, None, None], alpha=0.5, colors=chosen)
    picture = Image.fromarray(canvas.permute(1, 2, 0).numpy())
    order = pixels.argsort(descending=True).tolist()
    rows = [f"{classes[int(shown[at])]} {pixels[at].item() / labels.numel():.1%}" for at in order]
    width = 24 + max(int(ImageDraw.Draw(picture).textlength(row)) for row in rows)
    whole = Image.new("RGB", (picture.width + width, max(picture.height, _ROW * len(rows) + 4)), "white")
    whole.paste(picture)
    draw = ImageDraw.Draw(whole)
    for number, (at, row) in enumerate(zip(order, rows, strict=True)):
        left, top = picture.width + 4, 4 + _ROW * number
        draw.rectangle((left, top, left + 11, top + 11), fill=chosen[at], outline="black")
        draw.text((left + 16, top), row, fill="black")
    return whole

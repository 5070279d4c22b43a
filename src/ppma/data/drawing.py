"""Drawings of labelled samples, and a sheet of them."""

import colorsys
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from ppma.data.label_maps import IGNORED

Panel = tuple[Image.Image, str]  # a drawing and its caption

CELL = 256  # pixels, the side of a drawing on a sheet
_ROW, _GAP = 16, 6
_GOLDEN = 0.618034  # golden ratio: successive hues are far apart
_ALPHA = 0.5


def colour_of(label: int) -> tuple[int, int, int]:
    """The RGB colour of a label; colours of consecutive labels are easy to tell apart."""
    red, green, blue = colorsys.hsv_to_rgb(label * _GOLDEN % 1, 0.85, 1.0 - 0.35 * (label // 8 % 2))
    return round(255 * red), round(255 * green), round(255 * blue)


def to_pixels(image: Tensor, mean: Sequence[float] = (0.0,) * 3, std: Sequence[float] = (1.0,) * 3) -> Tensor:
    """Undo a normalisation: a float image (3, H, W) becomes uint8."""
    scaled = image * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
    return (scaled * 255).round().clamp(0, 255).byte()


def draw_image(pixels: Tensor) -> Image.Image:
    """An image (3, H, W), uint8, in the size of a cell."""
    return Image.fromarray(_fit(pixels).permute(1, 2, 0).contiguous().numpy())


def draw_instances(pixels: Tensor, boxes: Tensor, masks: Tensor, names: Sequence[str]) -> Image.Image:
    """Draw boxes, masks and class names, each instance in a colour of its own.

    Args:
        pixels: (3, H, W), uint8.
        boxes: (n, 4), left, top, right, bottom.
        masks: (n, H, W).
        names: n class names.
    """
    canvas = _fit(pixels)
    scale = canvas.shape[1] / pixels.shape[1]
    colours: list = [colour_of(number) for number in range(len(names))]
    if names:
        canvas = draw_segmentation_masks(canvas, _fit(masks, nearest=True).bool(), alpha=_ALPHA, colors=colours)
        canvas = draw_bounding_boxes(canvas, boxes * scale, colors=colours)
    picture = Image.fromarray(canvas.permute(1, 2, 0).contiguous().numpy())
    for (left, top, *_), name, colour in zip((boxes * scale).tolist(), names, colours, strict=True):
        _write(picture, (left + 2, max(0, top - _ROW + 4)), name, colour)
    return picture


def draw_labels(
    pixels: Tensor, labels: Tensor, classes: Sequence[str], palette: Sequence[tuple[int, int, int]] | None = None
) -> Image.Image:
    """Tint pixels by class and write the names of the classes in their colours; ignored pixels are black.

    Args:
        pixels: (3, H, W), uint8.
        labels: (H, W), classes from 0 and `IGNORED`.
        classes: class names.
        palette: colours of the classes, None for generated ones.
    """
    table = np.zeros((IGNORED + 1, 3), np.uint8)
    table[: len(classes)] = palette or [colour_of(label) for label in range(len(classes))]
    shown = _fit(labels[None], nearest=True)[0]
    tint = torch.from_numpy(table)[shown].permute(2, 0, 1)
    mixed = ((1 - _ALPHA) * _fit(pixels) + _ALPHA * tint).byte()
    mixed[:, shown == IGNORED] = 0
    picture = Image.fromarray(mixed.permute(1, 2, 0).contiguous().numpy())
    present = [label for label in labels.unique().tolist() if label != IGNORED]
    for row, label in enumerate(present[: CELL // _ROW]):
        _write(picture, (3, _ROW * row), classes[label], tuple(table[label].tolist()))
    return picture


def contact_sheet(panels: Sequence[Panel]) -> Image.Image:
    """Arrange drawings in a nearly square grid, each above its caption."""
    columns = int(np.ceil(np.sqrt(len(panels))))
    rows = -(-len(panels) // columns)
    width, height = CELL + _GAP, CELL + _ROW + _GAP
    sheet = Image.new("RGB", (columns * width + _GAP, rows * height + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (picture, caption) in enumerate(panels):
        left, top = _GAP + number % columns * width, _GAP + number // columns * height
        sheet.paste(picture, (left, top))
        while draw.textlength(caption) > CELL:
            caption = caption.rstrip(".")[:-1] + "..."
        draw.text((left, top + CELL + 2), caption, fill="black")
    return sheet


def _write(picture: Image.Image, corner: tuple[float, float], text: str, colour: tuple[int, ...]) -> None:
    ImageDraw.Draw(picture).text(corner, text, fill=colour, stroke_width=2, stroke_fill="black")


def _fit(planes: Tensor, nearest: bool = False) -> Tensor:
    """Scale (n, H, W) so that the longer side has the size of a cell; keeps the dtype."""
    height, width = planes.shape[-2:]
    factor = CELL / max(height, width)
    size = (max(1, round(height * factor)), max(1, round(width * factor)))
    mode = {"mode": "nearest-exact"} if nearest else {"mode": "bilinear", "antialias": True}
    scaled = torch.nn.functional.interpolate(planes[None].float(), size, **mode)[0]
    return (scaled if nearest else scaled.round()).to(planes.dtype)

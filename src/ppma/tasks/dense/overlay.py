"""Drawing predictions on images: instances with captions, classes of pixels with a legend."""

from collections.abc import Sequence

import numpy as np
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ppma.data.drawing import colour_of

OVERLAY = "_overlay.png"  # end of the names of drawings
BACKGROUND = ("background", "_background_", "__background__", "bg", "void", "unlabeled", "unlabelled")  # not painted

Colour = tuple[int, int, int]
Box = tuple[float, float, float, float]  # left, top, right, bottom

_LEAST_SIDE = 512  # smaller images are enlarged to make text readable
_ALPHA = 0.45
_LEAST_FONT = 12


def label_image(labels: Tensor, colours: Sequence[Colour]) -> Image.Image:
    """A label map as a palette image, whose pixels are class indices; with more than 256 classes as 16-bit grey values.

    Args:
        labels: (H, W), indices into `colours`.
        colours: of the classes.
    """
    if len(colours) > 256:
        return Image.fromarray(labels.numpy().astype(np.uint16))
    image = Image.fromarray(labels.numpy().astype(np.uint8))
    image.putpalette(bytes(value for colour in colours for value in colour))
    return image


def enlargement(image: Image.Image) -> int:
    """The integer factor by which a small image is enlarged before drawing."""
    return max(1, _LEAST_SIDE // max(image.size))


def draw_instances(
    image: Image.Image, boxes: Tensor, masks: Tensor, names: Sequence[str], scores: Sequence[float]
) -> Image.Image:
    """Draw each instance in a colour of its own: mask, outline, box, and a caption where it hides the least.

    Args:
        image: RGB.
        boxes: (n, 4), left, top, right, bottom in pixels.
        masks: (n, H, W), bool.
        names: n class names.
        scores: n scores in [0, 1].
    """
    factor = enlargement(image)
    pixels = _enlarged(image)
    masks = masks.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    areas = masks.sum((1, 2))
    order = areas.argsort(descending=True).tolist()  # small instances on top
    thickness = max(1, max(pixels.shape) // 300)
    # Each pixel's share of the instances that it shows: hiding a small instance is worse than a part of a large one.
    shares = np.zeros(pixels.shape[:2], np.float32)
    for place in order:
        part = _around(masks[place], thickness)
        _paint(pixels[part], masks[place][part].long(), (None, colour_of(place)), thickness)
        shares[masks[place].numpy()] += 1 / areas[place].item() if areas[place] else 0
    picture = Image.fromarray(pixels)
    draw, font = ImageDraw.Draw(picture), _font(picture)
    scaled: list[Box] = [tuple(box) for box in (boxes * factor).tolist()]
    for place in order:
        draw.rectangle(scaled[place], outline=colour_of(place))
    taken: list[Box] = []
    for place in reversed(order):
        text = f"{names[place]} {scores[place]:.2f}"
        width, height = draw.textlength(text, font) + 6, font.size + 4
        spot = min(_spots(scaled[place], width, height, picture.size), key=lambda spot: _hidden(spot, shares, taken))
        taken.append(spot)
        colour = colour_of(place)
        dark = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] < 128
        draw.rectangle(spot, fill=colour)
        draw.text((spot[0] + 3, sum(spot[1::2]) / 2), text, "white" if dark else "black", font, anchor="lm")
    return picture


def draw_classes(image: Image.Image, labels: Tensor, classes: Sequence[str], colours: Sequence[Colour]) -> Image.Image:
    """Colour pixels by class and add a legend of the classes that occur, largest first; background is not painted.

    Args:
        image: RGB.
        labels: (H, W), indices into `classes`.
        classes: class names; those of `BACKGROUND` are background.
        colours: RGB colours of the classes.
    """
    shown, counts = labels.unique(return_counts=True)
    painted = painted_colours(classes, colours)
    rows = []
    for place in counts.argsort(descending=True).tolist():
        label, share = int(shown[place]), counts[place].item() / counts.sum().item()
        rows.append((f"{classes[label]}  {share:.1%}", painted[label]))
    return _with_legend(paint_classes(image, labels, painted), rows)


def painted_colours(classes: Sequence[str], colours: Sequence[Colour]) -> list[Colour | None]:
    """The colours of the classes; None for background, which is not painted."""
    return [None if name.lower() in BACKGROUND else colour for name, colour in zip(classes, colours, strict=True)]


def paint_classes(image: Image.Image, labels: Tensor, painted: Sequence[Colour | None]) -> Image.Image:
    """Colour the pixels of an RGB image by their labels (H, W); small images are enlarged."""
    factor = enlargement(image)
    pixels = _enlarged(image)
    labels = labels.repeat_interleave(factor, 0).repeat_interleave(factor, 1)
    _paint(pixels, labels, painted, max(1, max(pixels.shape) // 600))  # two outlines meet
    return Image.fromarray(pixels)


def _enlarged(image: Image.Image) -> np.ndarray:
    factor = enlargement(image)
    return np.array(image.resize((image.width * factor, image.height * factor), Image.Resampling.BICUBIC))


def _font(picture: Image.Image) -> ImageFont.FreeTypeFont:
    """A font for the size of a picture."""
    font = ImageFont.load_default(max(_LEAST_FONT, max(picture.size) // 55))
    assert isinstance(font, ImageFont.FreeTypeFont)  # Pillow returns another without a size
    return font


def _paint(pixels: np.ndarray, labels: Tensor, colours: Sequence[Colour | None], thickness: int) -> None:
    """Tint pixels (H, W, 3), uint8, by their labels (H, W) and draw outlines, in place; None is not painted."""
    values = labels.numpy()
    table = np.array([colour or (0, 0, 0) for colour in colours])
    inside = np.array([colour is not None for colour in colours])[values]
    pixels[inside] = ((1 - _ALPHA) * pixels[inside] + _ALPHA * table[values[inside]]).astype(np.uint8)
    highest, lowest = _highest(labels, thickness), -_highest(-labels, thickness)
    outline = inside & (highest != lowest).numpy()  # near another label
    pixels[outline] = table[values[outline]]


def _highest(labels: Tensor, distance: int) -> Tensor:
    """The highest label within a distance, (H, W), by rows and then by columns."""
    size = 2 * distance + 1
    rows = F.max_pool2d(labels[None].float(), (1, size), 1, (0, distance))
    return F.max_pool2d(rows, (size, 1), 1, (distance, 0))[0]


def _around(mask: Tensor, margin: int) -> tuple[slice, slice]:
    """The part of the image that a mask (H, W) and a margin take."""
    rows, columns = (mask.any(axis).nonzero().flatten().tolist() or [0] for axis in (1, 0))
    return slice(max(0, rows[0] - margin), rows[-1] + 1 + margin), slice(
        max(0, columns[0] - margin), columns[-1] + 1 + margin
    )


def _spots(box: Box, width: float, height: float, size: tuple[int, int]) -> list[Box]:
    """Places for a caption in the picture: above, below, beside and in a box, the usual ones first."""
    left, top, right, bottom = box
    rows = (top - height - 1, bottom + 1, top - 2 * height - 1, bottom + height + 1)
    corners = [(x, y) for y in rows for x in (left, right - width)]
    corners += [(x, y) for x in (right + 1, left - width - 1) for y in (top, bottom - height)]
    corners += [(left + 1, top + 1), (left + 1, bottom - height - 1)]
    within = [(max(0, min(x, size[0] - width)), max(0, min(y, size[1] - height))) for x, y in corners]
    return [(x, y, x + width, y + height) for x, y in within]


def _hidden(spot: Box, shares: np.ndarray, taken: Sequence[Box]) -> float:
    """What a caption hides: the shares of instances, and of other captions."""
    left, top, right, bottom = spot
    hidden = float(shares[int(top) : int(bottom) + 1, int(left) : int(right) + 1].sum())
    for other in taken:
        width, height = min(right, other[2]) - max(left, other[0]), min(bottom, other[3]) - max(top, other[1])
        if width > 0 and height > 0:
            hidden += 2 * width * height / ((other[2] - other[0]) * (other[3] - other[1]))
    return round(hidden, 2)  # a few pixels are no reason for an unusual place


def _with_legend(picture: Image.Image, rows: Sequence[tuple[str, Colour | None]]) -> Image.Image:
    """The picture with a legend on its right: text and colour, or an empty box."""
    font = _font(picture)
    row = int(font.size) + 6
    width = int(2 * row + max(font.getlength(text) for text, _ in rows))
    whole = Image.new("RGB", (picture.width + width, max(picture.height, row * len(rows) + 8)), "white")
    whole.paste(picture)
    draw = ImageDraw.Draw(whole)
    for number, (text, colour) in enumerate(rows):
        left, top = picture.width + 8, 6 + row * number
        draw.rectangle((left, top, left + font.size, top + font.size), fill=colour, outline="black")
        draw.text((left + row + 2, top + font.size / 2), text, "black", font, anchor="lm")
    return whole

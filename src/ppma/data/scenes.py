"""Synthetic scenes: handwritten digits, scaled, rotated and overlapping on a textured background, with labels.

A scene is a function of (seed, split, index). Training scenes use the training split of the embedded digits, validation
scenes their test split.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from ppma.data.arrays import digits

CLASSES = tuple(str(digit) for digit in range(10))
SEMANTIC_CLASSES = ("background", *CLASSES)
SPLITS = {"train": "train", "val": "test"}  # split of the scenes: split of the digits

DIGITS = (2, 6)  # range of the number of digits that are tried, exclusive
SIDE = (0.28, 0.46)  # range of a digit's side, as a fraction of the scene's
ROTATION = 20.0  # largest rotation, in degrees
VISIBLE = 0.75  # smallest visible fraction of a digit
SOLID = 0.45  # smallest opacity of a digit's pixels


@dataclass(frozen=True)
class Scene:
    """An image and its annotations.

    Attributes:
        image: (H, W, 3), uint8.
        labels: (n,), int64, the digits from back to front.
        masks: (n, H, W), bool, the visible pixels of each digit; disjoint and not empty.
    """

    image: np.ndarray
    labels: np.ndarray
    masks: np.ndarray

    @property
    def boxes(self) -> np.ndarray:
        """The bounding boxes of the visible pixels, (n, 4): left, top, right, bottom, the last two exclusive."""
        boxes = np.zeros((len(self.masks), 4), np.int64)
        for box, mask in zip(boxes, self.masks, strict=True):
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            box[:] = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
        return boxes

    @property
    def semantic(self) -> np.ndarray:
        """The class of every pixel, (H, W), uint8: an index of `SEMANTIC_CLASSES`."""
        classes = np.zeros(self.image.shape[:2], np.uint8)
        for label, mask in zip(self.labels, self.masks, strict=True):
            classes[mask] = label + 1
        return classes


def compose(split: str, index: int, *, seed: int = 0, size: int = 96) -> Scene:
    """Make one scene.

    Args:
        split: "train" or "val".
        index: index of the scene.
        seed: seed of all scenes.
        size: side in pixels, at least 32.

    Examples:
        >>> from ppma.data.scenes import compose
        >>> compose("val", 0, size=64).image.shape
        (64, 64, 3)
    """
    if split not in SPLITS:
        raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
    if size < 32:
        raise ValueError(f"size: expected at least 32 pixels, got {size}")
    generator = np.random.default_rng((seed, list(SPLITS).index(split), index))
    source = digits(SPLITS[split])
    bright = bool(generator.integers(2))  # bright digits on a dark background, or the reverse
    image = _background(generator, size, dark=bright)
    labels: list[int] = []
    masks: list[np.ndarray] = []
    full: list[int] = []  # pixels of each digit when it was drawn
    for _ in range(int(generator.integers(*DIGITS))):
        picture, label = source[int(generator.integers(len(source)))]
        opacity = _placed(picture, generator, size)
        solid = opacity > SOLID
        remaining = [mask & ~solid for mask in masks]
        hidden = any(mask.sum() < VISIBLE * pixels for mask, pixels in zip(remaining, full, strict=True))
        if hidden or not solid.any():
            continue
        colour = generator.uniform(150, 255, 3) if bright else generator.uniform(0, 90, 3)
        image += opacity[:, :, None] * (colour - image)
        masks = [*remaining, solid]
        labels.append(label)
        full.append(int(solid.sum()))
    image += generator.normal(0, 4, image.shape)
    stacked = np.stack(masks) if masks else np.zeros((0, size, size), bool)
    return Scene(np.clip(image, 0, 255).astype(np.uint8), np.array(labels, np.int64), stacked)


def _background(generator: np.random.Generator, size: int, *, dark: bool) -> np.ndarray:
    """Clouds of colour with stripes, (size, size, 3), float64."""
    low, high = (10, 110) if dark else (140, 245)
    cells = int(generator.integers(2, 7))
    clouds = Image.fromarray(generator.integers(low, high, (cells, cells, 3), dtype=np.uint8))
    background = np.asarray(clouds.resize((size, size), Image.Resampling.BICUBIC), np.float64)
    angle, wavelength = generator.uniform(0, np.pi), generator.uniform(4, 20)
    rows, columns = np.mgrid[:size, :size]
    phase = (rows * np.sin(angle) + columns * np.cos(angle)) * (2 * np.pi / wavelength)
    return background + generator.uniform(0, 12) * np.sin(phase)[:, :, None]


def _placed(picture: Image.Image, generator: np.random.Generator, size: int) -> np.ndarray:
    """The opacity of a digit, scaled, rotated and placed in the scene: (size, size) in [0, 1]."""
    side = round(generator.uniform(*SIDE) * size)
    stretched = round(side * generator.uniform(0.8, 1.2))
    drawn = picture.convert("L").resize((side, stretched), Image.Resampling.BICUBIC)
    drawn = drawn.rotate(generator.uniform(-ROTATION, ROTATION), Image.Resampling.BICUBIC, expand=True)
    canvas = Image.new("L", (size, size))
    room = size - drawn.width, size - drawn.height
    canvas.paste(drawn, (int(generator.integers(max(1, room[0]))), int(generator.integers(max(1, room[1])))))
    return np.asarray(canvas, np.float64) / 255

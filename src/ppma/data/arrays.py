"""Data sets in memory: the embedded digits, and IDX files such as Fashion-MNIST's."""

import functools
import gzip
import math
import struct
import zlib
from importlib import resources
from pathlib import Path

import numpy as np

from ppma.data.source import SPLIT_SEED, ArrayImages, ImageSource, Subset, stratified

DIGIT_SPLITS = {"train": 0.7, "val": 0.1, "test": 0.2}

FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_IDX_PREFIX = {"train": "train", "val": "t10k", "test": "t10k"}


@functools.cache
def digit_arrays() -> tuple[np.ndarray, np.ndarray]:
    """The UCI handwritten digits: images (1797, 8, 8) uint8 and labels (1797,) int64. No image occurs twice."""
    packed = resources.files("ppma.data").joinpath("files/digits.csv.gz").read_bytes()
    table = np.loadtxt(gzip.decompress(packed).decode().splitlines(), delimiter=",", dtype=np.uint8)
    images = np.round(table[:, :64].astype(np.float32) * (255 / 16)).astype(np.uint8)
    return images.reshape(-1, 8, 8), table[:, 64].astype(np.int64)


def digits(split: str) -> ImageSource:
    """One split of the embedded digits: train (1,258 images), val (180) or test (359), stratified by class.

    Examples:
        >>> from ppma.data.arrays import digits
        >>> image, label = digits("val")[0]
        >>> len(digits("val")), image.size
        (180, (8, 8))
    """
    if split not in DIGIT_SPLITS:
        raise ValueError(f"data split: the digits have {', '.join(DIGIT_SPLITS)}, got {split!r}")
    images, labels = digit_arrays()
    parts = stratified(labels.tolist(), list(DIGIT_SPLITS.values()), SPLIT_SEED)
    chosen = parts[list(DIGIT_SPLITS).index(split)]
    return Subset(ArrayImages(images, labels, [str(digit) for digit in range(10)]), chosen)


def read_idx(path: Path) -> np.ndarray:
    """Read an IDX file of unsigned bytes, gzipped or not."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zero, kind, axes = struct.unpack(">HBB", raw[:4])
        shape = struct.unpack(f">{axes}I", raw[4 : 4 + 4 * axes])
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise ValueError(f"{path}: expected an IDX file of unsigned bytes ({error})") from None
    if zero or kind != 8 or len(raw) != 4 + 4 * axes + math.prod(shape):
        raise ValueError(f"{path}: expected an IDX file of unsigned bytes, of {shape} by its header")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)


def idx_images(root: str, split: str, classes: tuple[str, ...]) -> ImageSource:
    """Open MNIST-like files in a folder: train-images-idx3-ubyte and so on, with or without .gz."""
    if split not in _IDX_PREFIX:
        raise ValueError(f"data split: expected one of {', '.join(_IDX_PREFIX)}, got {split!r}")
    found = []
    for part in ("images-idx3", "labels-idx1"):
        name = f"{_IDX_PREFIX[split]}-{part}-ubyte"
        paths = [path for path in (Path(root) / name, Path(root) / f"{name}.gz") if path.is_file()]
        if not paths:
            raise ValueError(f"data.root: expected {name}(.gz) in {root}, found none")
        found.append(read_idx(paths[0]))
    images, labels = found
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"data.root: expected images (N, H, W) and labels (N,) in {root}, found {images.shape} and {labels.shape}"
        )
    if labels.size and labels.max() >= len(classes):
        raise ValueError(f"data.root: expected labels from 0 to {len(classes) - 1} in {root}, found {labels.max()}")
    return ArrayImages(images, labels.astype(np.int64), classes)

"""CIFAR-10 in the files of its authors, which torchvision downloads: `cifar-10-batches-py` or `cifar-10-batches-bin`.

The Python version is a pickle. It is read without executing any code of it: the few names that occur in these files are
replaced by classes that record bytes, and every other name is an error.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from ppma.data.source import SPLIT_SEED, ArrayImages, ImageSource, Subset, stratified

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
VAL_FRACTION = 0.04  # 200 images of each class
_BYTES = 3 * SIDE * SIDE
_FOLDERS = {"cifar-10-batches-py": "", "cifar-10-batches-bin": ".bin"}
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_FILES = {"train": _TRAIN, "val": _TRAIN, "trainval": _TRAIN, "test": ("test_batch",)}
_LARGEST_FILE = 1 << 26  # twice the size of the real ones


class _Array:
    """Stands for a pickled NumPy array, of which it keeps the bytes."""

    data: bytes = b""

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.data = state[-1] if isinstance(state, tuple) and state and isinstance(state[-1], bytes) else b""


class _Ignored:
    """Stands for a pickled object of no interest."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _encode(text: object, encoding: object) -> bytes:
    """Bytes that Python 3 pickled for Python 2."""
    return text.encode("latin-1") if isinstance(text, str) else b""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        arrays = ("numpy.core.multiarray", "numpy._core.multiarray")
        known = {(module_, "_reconstruct"): _Array for module_ in arrays} | {
            ("numpy", "ndarray"): _Array,
            ("numpy", "dtype"): _Ignored,
            ("_codecs", "encode"): _encode,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return known[module, name]


def _from_pickle(raw: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3072) and labels (N,), uint8, of one file of the Python version."""
    content = _Reader(io.BytesIO(raw), encoding="bytes").load()
    images = content[b"data"] if b"data" in content else content["data"]
    labels = content[b"labels"] if b"labels" in content else content["labels"]
    if not isinstance(images, _Array):
        raise ValueError("data is not an array")
    return np.frombuffer(images.data, np.uint8).reshape(-1, _BYTES), np.asarray(labels, np.uint8)


def read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """One file: images (N, 32, 32, 3) and labels (N,), uint8. Names that end in .bin are of the binary version."""
    kind = "binary" if path.suffix == ".bin" else "Python"
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ValueError(f"it has {path.stat().st_size:,} bytes")
        raw = path.read_bytes()
        if kind == "binary":
            rows = np.frombuffer(raw, np.uint8).reshape(-1, 1 + _BYTES)
            labels, images = rows[:, 0], rows[:, 1:]
        else:
            images, labels = _from_pickle(raw)
        if len(images) != len(labels) or not len(labels) or labels.max() >= len(CLASSES):
            raise ValueError(f"it has {len(images)} images and {len(labels)} labels from 0 to {max(labels, default=0)}")
    except Exception as error:  # damaged pickles raise almost anything
        detail = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path}: expected a file of CIFAR-10's {kind} version: {detail}") from None
    return np.ascontiguousarray(images.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)), labels


def cifar10_images(root: str, split: str) -> ImageSource:
    """One split of CIFAR-10.

    Args:
        root: folder that holds `cifar-10-batches-py` or `cifar-10-batches-bin`, or one of these.
        split: "train" (48,000 images), "val" (2,000 that "train" lacks, stratified, the same at every seed), "trainval"
            (all 50,000 training images) or "test" (10,000).
    """
    if split not in _FILES:
        raise ValueError(f"data split: CIFAR-10 has {', '.join(_FILES)}, got {split!r}")
    candidates = [(folder, suffix) for name, suffix in _FOLDERS.items() for folder in (Path(root) / name, Path(root))]
    first = _FILES[split][0]
    found = next(((folder, suffix) for folder, suffix in candidates if (folder / f"{first}{suffix}").is_file()), None)
    if found is None:
        raise ValueError(f"data.root: expected {' or '.join(_FOLDERS)} with {first} in {root}, found neither")
    folder, suffix = found
    parts = [read_batch(folder / f"{name}{suffix}") for name in _FILES[split]]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    source = ArrayImages(images, labels.astype(np.int64), CLASSES)
    if split not in ("train", "val"):
        return source
    train, val = stratified(source.labels(), [1 - VAL_FRACTION, VAL_FRACTION], SPLIT_SEED)
    return Subset(source, val if split == "val" else train)

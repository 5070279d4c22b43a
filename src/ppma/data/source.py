"""Labelled images, before any transform, and splits of them."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

SPLIT_SEED = 0  # of splits that this package makes, which do not depend on the seed of a run


class ImageSource(Dataset, ABC):
    """Labelled images by index: `source[i]` is an RGB image and the index of its class.

    Attributes:
        classes: class names, indexed by label.
    """

    classes: tuple[str, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[Image.Image, int]: ...

    @abstractmethod
    def labels(self) -> Sequence[int]:
        """The label of every image, without reading images."""


class ArrayImages(ImageSource):
    """Images in memory.

    Args:
        images: (N, H, W) or (N, H, W, 3), uint8.
        labels: (N,).
        classes: class names, indexed by label.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> None:
        self.images, self.targets, self.classes = images, labels, tuple(classes)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]).convert("RGB"), int(self.targets[index])

    def labels(self) -> Sequence[int]:
        return self.targets.tolist()


class Subset(ImageSource):
    """The images of a source at the given indices."""

    def __init__(self, source: ImageSource, indices: Sequence[int]) -> None:
        self.source, self.indices, self.classes = source, indices, source.classes

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.source[self.indices[index]]

    def labels(self) -> Sequence[int]:
        labels = self.source.labels()
        return [labels[index] for index in self.indices]


def stratified(labels: Sequence[int], fractions: Sequence[float], seed: int) -> list[list[int]]:
    """Split indices into parts that have the same fraction of every class, up to rounding.

    Args:
        labels: labels of all samples.
        fractions: fraction of each part, at most 1 in total.
        seed: seed of the shuffle within each class.

    Returns:
        Disjoint, sorted lists of indices.

    Examples:
        >>> from ppma.data.source import stratified
        >>> train, val = stratified([0, 0, 0, 0, 1, 1, 1, 1], [0.75, 0.25], seed=0)
        >>> len(train), len(val)
        (6, 2)
    """
    generator = np.random.default_rng(seed)
    parts: list[list[int]] = [[] for _ in fractions]
    targets = np.asarray(labels)
    for label in np.unique(targets):
        members = generator.permutation(np.flatnonzero(targets == label))
        edges = np.round(np.cumsum([0.0, *fractions]) * len(members)).astype(int)
        for part, first, last in zip(parts, edges[:-1], edges[1:], strict=True):
            part += members[first:last].tolist()
    return [sorted(part) for part in parts]


def validation_split(
    labels: Sequence[int], fraction: float, missing: str, *, validation: bool, kind: str = "stratified"
) -> list[int]:
    """The indices of one part of training images that have no validation images beside them.

    Args:
        labels: labels of the images; all the same for a random split.
        fraction: fraction of the images to validate on.
        missing: which validation images were looked for and not found, for the warning.
        validation: return the validation part, with a warning that gives the numbers; else the training part.
        kind: word for the split, for the warning.
    """
    parts = stratified(labels, [1 - fraction, fraction], SPLIT_SEED)
    if not parts[1]:
        raise ValueError(f"data.val_fraction: {fraction:g} of {len(labels)} images leaves none to validate on")
    if validation:
        warnings.warn(
            f"data.root: {missing}: validating on {len(parts[1])} of {len(labels)} "
            f"training images, a {kind} split of {fraction:.0%} with seed {SPLIT_SEED}",
            stacklevel=4,
        )
    return parts[validation]


def check_classes(classes: Sequence[str], others: Sequence[str], *, found: str, expected: str) -> None:
    """Raise a ValueError unless both have the same classes in the same order.

    Args:
        classes: the classes found.
        others: the classes expected.
        found: what has `classes`, for the message.
        expected: what has `others`, for the message.
    """
    if tuple(classes) == tuple(others):
        return
    lacking = [name for name in others if name not in set(classes)]
    surplus = [name for name in classes if name not in set(others)]
    parts = [
        f"{len(names)} {word} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
        for names, word in ((lacking, "missing"), (surplus, "unexpected"))
        if names
    ]
    raise ValueError(
        f"classes: {found} has {len(classes)} and {expected} {len(others)}: {'; '.join(parts) or 'in another order'}"
    )

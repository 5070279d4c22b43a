"""Class names of ImageNet-1K."""

import functools
from collections.abc import Sequence

from timm.data import ImageNetInfo


@functools.cache
def _info() -> ImageNetInfo:
    return ImageNetInfo()


@functools.cache
def class_ids() -> tuple[str, ...]:
    """WordNet ids of the 1,000 classes in the usual order; folders of ImageNet have these names."""
    return tuple(_info().label_names())


def readable(classes: Sequence[str]) -> tuple[str, ...]:
    """Replace WordNet ids of ImageNet by their words, and keep other names.

    Examples:
        >>> readable(["n01440764", "my class"])
        ('tench, Tinca tinca', 'my class')
    """
    known = set(class_ids())
    return tuple(_info().label_name_to_description(name) if name in known else name for name in classes)

"""What the values of label maps mean, checked for every map that is read and, before a run, for a sample."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ppma.data.errors import BrokenSampleError, LabelFormatError

IGNORED = 255  # label of pixels without a class, whichever value the files use
LARGEST_VALUE = 65535  # 16 bits
SHOWN_CLASSES = 30

Convention = Literal["ade20k", "plain", "binary"]


@dataclass(frozen=True)
class LabelFormat:
    """How the values of label maps become labels.

    Attributes:
        convention: "ade20k": 0 is ignored and k is class k - 1. "plain": k is class k. "binary": 0 is the first
            class, 1 and 255 are the second.
        ignore_index: ignored value. None: 255 with "plain", only 0 with "ade20k", none with "binary".
        classes: names of the classes.
        hint: what to check when a value is out of range.
    """

    convention: Convention
    ignore_index: int | None
    classes: tuple[str, ...]
    hint: str

    @property
    def offset(self) -> int:
        """The value of the first class."""
        return 1 if self.convention == "ade20k" else 0

    @property
    def ignored(self) -> tuple[int, ...]:
        """The values of pixels without a class."""
        given = () if self.ignore_index is None else (self.ignore_index,)
        if self.convention == "ade20k":
            return tuple(sorted({0, *given}))
        return given or ((IGNORED,) if self.convention == "plain" else ())

    def to_labels(self, values: np.ndarray, name: str) -> np.ndarray:
        """Convert the values of a label map to labels.

        Args:
            values: (H, W), integers.
            name: of the file, for messages.

        Returns:
            (H, W), int64: classes from 0, and `IGNORED`.
        """
        wrong = [int(value) for value in (values.min(), values.max()) if not 0 <= value <= LARGEST_VALUE]
        if not wrong:
            labels = self._table[values]
            if labels.min() >= 0:
                return labels
            wrong = [int(values[labels < 0].max())]
        raise LabelFormatError(f"{name}: label {wrong[-1]} out of range, expected {self}; {self.hint}")

    @functools.cached_property
    def _table(self) -> np.ndarray:
        """The label of every value, -1 for values out of range."""
        table = np.full(LARGEST_VALUE + 1, -1, np.int64)
        table[self.offset : self.offset + len(self.classes)] = np.arange(len(self.classes))
        if self.convention == "binary":
            table[IGNORED] = 1
        table[list(self.ignored)] = IGNORED
        return table

    def __str__(self) -> str:
        last = len(self.classes) - 1 + self.offset
        values = "0 and 255 (or 1)" if self.convention == "binary" else f"{self.offset} to {last}"
        ignored = " and ".join(map(str, self.ignored)) or "none"
        return f"{values} for {len(self.classes)} classes, {ignored} ignored (labels: {self.convention})"


@dataclass(frozen=True)
class LabelCounts:
    """Pixels of each class in a sample of label maps.

    Attributes:
        format: how the maps were read.
        pixels: number of pixels of each class.
        ignored: number of pixels without a class.
        maps: number of label maps in the sample.
        of: number of label maps in the split.
    """

    format: LabelFormat
    pixels: tuple[int, ...]
    ignored: int
    maps: int
    of: int

    def lines(self, title: str) -> list[str]:
        """The histogram as text, most frequent classes first."""
        total = max(1, sum(self.pixels) + self.ignored)
        rows = sorted(zip(self.pixels, self.format.classes, strict=True), key=lambda row: -row[0])
        present = [row for row in rows if row[0]]
        absent = [name for pixels, name in rows if not pixels]
        lines = [f"{title}: {self.maps} of {self.of} label maps read; {self.format}"]
        lines += [_row(pixels, total, name) for pixels, name in present[:SHOWN_CLASSES]]
        rest = present[SHOWN_CLASSES:]
        if rest:
            lines.append(_row(sum(pixels for pixels, _ in rest), total, f"({len(rest)} other classes)"))
        lines.append(_row(self.ignored, total, "(ignored)"))
        if absent:
            shown = ", ".join(absent[:SHOWN_CLASSES]) + (", ..." if len(absent) > SHOWN_CLASSES else "")
            lines.append(f"  not in these maps: {shown}")
        return lines


def _row(pixels: int, total: int, name: str) -> str:
    return f"  {pixels / total:7.2%}  {pixels:>13,}  {name}"


def count_labels(
    read: Callable[[int], np.ndarray], indices: Iterable[int], format: LabelFormat, of: int
) -> LabelCounts:
    """Count the classes in a sample of label maps. Unreadable maps are left to the run, which skips and counts them.

    Args:
        read: returns the labels of the map with an index, see `LabelFormat.to_labels`.
        indices: the sample.
        format: how the maps are read.
        of: number of label maps in the split.

    Raises:
        ValueError: a map contradicts the format, or none can be read.
    """
    pixels = np.zeros(IGNORED + 1, np.int64)
    maps, unreadable = 0, ""
    for index in indices:
        try:
            pixels += np.bincount(read(index).ravel(), minlength=len(pixels))
        except LabelFormatError as error:
            raise ValueError(str(error)) from None
        except BrokenSampleError as error:
            unreadable = str(error)
        else:
            maps += 1
    if not maps:
        raise ValueError(f"data.root: expected readable images and label maps, found none in a sample: {unreadable}")
    return LabelCounts(format, tuple(pixels[: len(format.classes)].tolist()), int(pixels[IGNORED]), maps, of)


def spread(count: int, most: int) -> Sequence[int]:
    """At most `most` evenly spread indices below `count`."""
    return range(count) if count <= most else [index * count // most for index in range(most)]

"""What the samples of a data set hold, for `ppma data check`."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch.utils.data import Dataset

from ppma.data.errors import BrokenSampleError
from ppma.data.label_maps import spread
from ppma.progress import track


@dataclass(frozen=True)
class SampleFacts:
    """What one sample holds.

    Attributes:
        size: (width, height) of the image in pixels, before any transform.
        counts: units of each class by name; names in parentheses are not classes, such as "(ignored)".
    """

    size: tuple[int, int]
    counts: Mapping[str, int]


class CheckedData(Dataset, ABC):
    """A data set whose samples can be examined without their transform.

    Attributes:
        unit: what has a class: "images", "instances" or "pixels".
        classes: class names, in the order of the labels.
    """

    unit: ClassVar[str]
    classes: tuple[str, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def examine(self, index: int) -> SampleFacts:
        """Read a sample completely.

        Raises:
            BrokenSampleError: the sample cannot be read.
        """


@dataclass
class SplitFacts:
    """What a split holds.

    Attributes:
        name: "train", "val" or "test".
        unit: see `CheckedData`.
        classes: class names, in the order of the labels.
        samples: number of samples of the split.
        read: number of samples that were read, broken ones included.
        broken: a message for each broken sample.
        sizes: number of images by (width, height).
        counts: units by class name.
    """

    name: str
    unit: str
    classes: tuple[str, ...]
    samples: int
    read: int = 0
    broken: list[str] = field(default_factory=list)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    def describe_sizes(self) -> str:
        """The most frequent size and the range of sizes."""
        if len(self.sizes) == 1:
            return "all {} x {}".format(*next(iter(self.sizes)))
        (width, height), times = self.sizes.most_common(1)[0]
        ranges = [f"{min(sides)} to {max(sides)}" for sides in zip(*self.sizes, strict=True)]
        most = f", most often {width} x {height} ({times})" if times > 1 else ""
        return f"width {ranges[0]}, height {ranges[1]}{most}"


def examine(name: str, data: CheckedData, limit: int | None = None) -> SplitFacts:
    """Read the samples of a split.

    Args:
        name: name of the split.
        data: its samples.
        limit: read at most this many samples, evenly spread; None for all.

    Raises:
        ValueError: no sample can be read.
    """
    facts = SplitFacts(name, data.unit, data.classes, len(data))
    for index in track(spread(len(data), len(data) if limit is None else limit), f"reading {name}"):
        facts.read += 1
        try:
            sample = data.examine(index)
        except BrokenSampleError as error:
            facts.broken.append(str(error))
        else:
            facts.sizes[sample.size] += 1
            facts.counts.update(sample.counts)
    if not facts.sizes:
        found = f"all {facts.read} that were read are broken, the first: {facts.broken[0]}" if facts.read else "none"
        raise ValueError(f"data: expected readable samples in split {name!r}, found {found}")
    return facts

"""WebDataset shards: tar files of `key.jpg` + `key.cls`, read at random.

The shards are indexed once by their headers, so that a sample is a position in a file: any order, exact resume, and
every sample once in evaluation, which streaming the shards could not give.
"""

import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from ppma.data.source import ImageSource, decode

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


class _Member(NamedTuple):
    shard: str
    offset: int
    size: int
    name: str


class ShardImages(ImageSource):
    """Images of a set of shards.

    Args:
        root: folder of the shards.
        split: they are named `<split>*.tar`.
        classes: names of the classes; numbers if None.
    """

    def __init__(self, root: str, split: str, classes: Sequence[str] | None = None) -> None:
        shards = sorted(Path(root).glob(f"{split}*.tar"))
        if not shards:
            raise ValueError(f"data.root: expected shards {split}*.tar in {root}, found none")
        self.members: list[_Member] = []
        self.targets: list[int] = []
        for shard in shards:
            self._index(shard)
        count = max(self.targets, default=-1) + 1
        self.classes = tuple(classes) if classes is not None else tuple(map(str, range(count)))
        if count > len(self.classes):
            raise ValueError(f"data.root: label {count - 1} in {root}, but only {len(self.classes)} classes")

    def _index(self, shard: Path) -> None:
        images: dict[str, _Member] = {}
        labels: dict[str, int] = {}
        try:
            with tarfile.open(shard) as archive:
                for member in archive:
                    stem, suffix = os.path.splitext(member.name)
                    if suffix.lower() in IMAGE_SUFFIXES:
                        images[stem] = _Member(str(shard), member.offset_data, member.size, f"{shard}:{member.name}")
                    elif suffix == ".cls":
                        content = archive.extractfile(member)
                        labels[stem] = int(content.read()) if content is not None else -1
        except (tarfile.TarError, ValueError) as error:
            raise ValueError(f"{shard}: not a readable shard ({error})") from None
        for stem, image in images.items():
            if labels.get(stem, -1) < 0:
                raise ValueError(f"{shard}: {stem} has an image and no label ({stem}.cls)")
            self.members.append(image)
            self.targets.append(labels[stem])

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        shard, offset, size, name = self.members[index]
        with open(shard, "rb") as file:
            file.seek(offset)
            content = file.read(size)
        return decode(io.BytesIO(content), name), self.targets[index]

    def labels(self) -> Sequence[int]:
        return self.targets

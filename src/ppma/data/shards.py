"""Random access to images in tar files: WebDataset shards (`key.jpg` + `key.cls`) and archives of class folders.

The archives are indexed once by their headers, so that a sample is a position in a file. Unlike streaming, this allows
any order, exact resume, and evaluation of every sample once. (timm's archive reader stores its index as a pickle beside
the archives and would execute it.)
"""

import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from PIL import Image
from timm.utils.misc import natural_key

from ppma.data.decoding import IMAGE_SUFFIXES, decode
from ppma.data.errors import BrokenSampleError
from ppma.data.source import ImageSource

MOST_CLASSES = 1_000_000  # a larger number in a .cls file is a mistake


class _Member(NamedTuple):
    archive: str
    offset: int
    size: int
    name: str


class TarImages(ImageSource):
    """Images of the archives `<split>*.tar` in a folder.

    Args:
        root: the folder.
        split: prefix of the archives' names.
        labels: "cls" reads the label from a .cls file beside each image, "folder" from the name of its folder.
    """

    def __init__(self, root: str, split: str, labels: Literal["cls", "folder"]) -> None:
        archives = sorted(Path(root).glob(f"{split}*.tar"))
        if not archives:
            raise ValueError(f"data.root: expected {split}*.tar in {root}, found none")
        self.members: list[_Member] = []
        names: list[str] = []
        for archive in archives:
            try:
                self._index(archive, labels, names)
            except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError) as error:
                raise ValueError(f"{archive}: not a readable archive ({error})") from None
        if not names:
            raise ValueError(f"data.root: no image in {split}*.tar of {root}")
        self.classes = tuple(sorted(set(names), key=natural_key))
        if labels == "cls":  # numbers: a class without images keeps its index
            self.classes = tuple(map(str, range(int(self.classes[-1]) + 1)))
        place = {name: label for label, name in enumerate(self.classes)}
        self.targets = [place[name] for name in names]

    def _index(self, path: Path, labels: str, names: list[str]) -> None:
        images: dict[str, _Member] = {}
        written: dict[str, str] = {}
        with tarfile.open(path) as archive:
            for member in archive:
                stem, suffix = os.path.splitext(member.name)
                if suffix.lower() in IMAGE_SUFFIXES:
                    images[stem] = _Member(str(path), member.offset_data, member.size, f"{path}:{member.name}")
                elif suffix == ".cls" and (content := archive.extractfile(member)) is not None:
                    written[stem] = content.read().decode().strip()
        for stem, image in images.items():
            name = written.get(stem, "") if labels == "cls" else os.path.basename(os.path.dirname(stem))
            if not name or (labels == "cls" and not _is_class_number(name)):
                expected = f"a number in {stem}.cls" if labels == "cls" else "a class folder around it"
                raise ValueError(f"{image.name}: expected {expected}, found {name[:40] or 'none'}")
            self.members.append(image)
            names.append(str(int(name)) if labels == "cls" else name)

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        archive, offset, size, name = self.members[index]
        try:
            with open(archive, "rb") as file:
                file.seek(offset)
                content = file.read(size)
        except OSError as error:
            raise BrokenSampleError(f"{name}: {error.strerror}") from None
        return decode(io.BytesIO(content), name), self.targets[index]

    def labels(self) -> Sequence[int]:
        return self.targets


def _is_class_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) < MOST_CLASSES

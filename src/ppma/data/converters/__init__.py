"""Conversion of YOLO, Pascal VOC and Cityscapes to the layouts that are read: COCO files and label maps."""

from collections.abc import Callable
from pathlib import Path

from ppma.data.converters import cityscapes, voc, yolo
from ppma.data.converters.target import Target
from ppma.data.errors import BrokenSampleError

# Functions that read a folder and add to a target what they find.
CONVERTERS: dict[str, Callable[[Path, Target], None]] = {
    "yolo": yolo.convert,
    "voc": voc.convert,
    "cityscapes": cityscapes.convert,
}


def convert(layout: str, source: str | Path, dest: str | Path, *, link: bool = False) -> list[str]:
    """Convert a data set. `dest` is complete or, after an error, not there.

    Args:
        layout: a name of `CONVERTERS`.
        source: folder of the data set.
        dest: a new or empty folder. Instances are written as `annotations/instances_SPLIT.json` with images in
            `SPLIT/`, label maps as `images/`, `labels/` and `classes.txt`.
        link: make symbolic links to the images instead of copies.

    Returns:
        Lines about what was written.

    Raises:
        ValueError: invalid input, or a folder that is not empty; one line that names the file.
    """
    if layout not in CONVERTERS:
        raise ValueError(f"layout: expected one of {', '.join(CONVERTERS)}, got {layout!r}")
    if not Path(source).exists():
        raise ValueError(f"source: expected a folder, found none at {source}")
    with Target(Path(dest), link=link) as target:
        try:
            CONVERTERS[layout](Path(source), target)
        except BrokenSampleError as error:
            raise ValueError(str(error)) from None
        if not any(target.folder.iterdir()):
            raise ValueError(f"source: expected annotated images in {source}, found none")
        return target.lines

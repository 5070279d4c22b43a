"""Oxford-IIIT Pet in torchvision's layout: `images/NAME.jpg`, `annotations/trimaps/NAME.png` and two lists of names.

A trimap labels the pet 1, the background 2, and 3 the border between them, where the annotators left it open.
"""

from pathlib import Path

from ppma.data.layouts import Layout, Pair, existing_pairs, read_names

FOLDER = "oxford-iiit-pet"  # which torchvision creates in its root
CLASSES = ("pet", "background", "border")
_COLOURS = ((255, 140, 0), (40, 60, 90), (255, 255, 255))
_VAL_EVERY = 10  # the lists are sorted by breed, so every tenth name is a stratified sample
_LISTS = {"train": "trainval.txt", "val": "trainval.txt", "trainval": "trainval.txt", "test": "test.txt"}


def _pairs(root: Path, split: str) -> list[Pair]:
    if split not in _LISTS:
        raise ValueError(f"data split: Oxford-IIIT Pet has {', '.join(_LISTS)}, got {split!r}")
    root = root / FOLDER if (root / FOLDER).is_dir() else root
    annotations, images = root / "annotations", root / "images"
    names = [line.split()[0] for line in read_names(annotations / _LISTS[split])]
    if split in ("train", "val"):
        names = [name for index, name in enumerate(names) if (index % _VAL_EVERY == 0) == (split == "val")]
    maps = annotations / "trimaps"
    return existing_pairs([(images / f"{name}.jpg", maps / f"{name}.png") for name in names], images, str(maps))


LAYOUT = Layout(
    _pairs,
    lambda root: ("Oxford-IIIT Pet", CLASSES),
    "train",
    "val",
    labels="ade20k",  # k is class k - 1
    palette=_COLOURS,
    hint="trimaps hold 1 (pet), 2 (background) and 3 (border)",
)

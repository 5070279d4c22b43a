"""Cityscapes' layout: `leftImg8bit/SPLIT/CITY/*_leftImg8bit.png`, `gtFine/SPLIT/CITY/*_gtFine_labelTrainIds.png`."""

from pathlib import Path

from ppma.data.layouts import Layout, Pair, existing_pairs, images_in

_IMAGE, _MAP, _RAW_MAP = "_leftImg8bit", "_gtFine_labelTrainIds.png", "_gtFine_labelIds.png"
_CREATE = "cityscapesScripts' csCreateTrainIdLabelImgs writes the labelTrainIds files"

# The classes of the evaluation in the order of their train ids, with the official colours.
_COLOURS = {
    "road": (128, 64, 128),
    "sidewalk": (244, 35, 232),
    "building": (70, 70, 70),
    "wall": (102, 102, 156),
    "fence": (190, 153, 153),
    "pole": (153, 153, 153),
    "traffic light": (250, 170, 30),
    "traffic sign": (220, 220, 0),
    "vegetation": (107, 142, 35),
    "terrain": (152, 251, 152),
    "sky": (70, 130, 180),
    "person": (220, 20, 60),
    "rider": (255, 0, 0),
    "car": (0, 0, 142),
    "truck": (0, 0, 70),
    "bus": (0, 60, 100),
    "train": (0, 80, 100),
    "motorcycle": (0, 0, 230),
    "bicycle": (119, 11, 32),
}
CLASSES = tuple(_COLOURS)


def _pairs(root: Path, split: str) -> list[Pair]:
    images, maps = root / "leftImg8bit" / split, root / "gtFine" / split
    if not images.is_dir():
        raise ValueError(f"data.root: expected a folder {images}, found none")
    pairs = []
    for city in sorted(path for path in images.iterdir() if path.is_dir()):
        stems = ((path, path.stem.removesuffix(_IMAGE)) for path in images_in(city) if path.stem.endswith(_IMAGE))
        pairs += [(path, maps / city.name / f"{stem}{_MAP}") for path, stem in stems]
    if pairs and not any(path.is_file() for _, path in pairs) and any(maps.glob(f"*/*{_RAW_MAP}")):
        raise ValueError(f"data.root: expected {maps}/CITY/*{_MAP}, found only *{_RAW_MAP}: {_CREATE}")
    return existing_pairs(pairs, images, f"{maps}/CITY/*{_MAP}")


LAYOUT = Layout(
    _pairs,
    lambda root: ("Cityscapes", CLASSES),
    "train",
    "val",
    labels="plain",
    palette=tuple(_COLOURS.values()),
    hint=f"labels 19 to 33 are those of labelIds files, not of labelTrainIds: {_CREATE}",
)

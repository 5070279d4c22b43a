"""ADE20K's layout: `images/SPLIT/NAME.jpg`, `annotations/SPLIT/NAME.png`, and a file that names the classes."""

from pathlib import Path

from ppma.data.layouts import Layout, Pair, existing_pairs, images_in, read_names

_PLAIN_NAMES, _OFFICIAL_NAMES = "classes.txt", "objectInfo150.txt"


def _pairs(root: Path, split: str) -> list[Pair]:
    images, maps = root / "images" / split, root / "annotations" / split
    found = images_in(images)
    if not maps.is_dir():
        raise ValueError(f"data.root: expected a folder {maps}, found none")
    return existing_pairs(((path, maps / f"{path.stem}.png") for path in found), images, str(maps))


def _classes(root: Path) -> tuple[str, tuple[str, ...]]:
    """From classes.txt, a name on each line, or from ADE20K's own table."""
    plain, official = root / _PLAIN_NAMES, root / _OFFICIAL_NAMES
    source = plain if plain.is_file() else official
    if not source.is_file():
        return f"{_PLAIN_NAMES} or {_OFFICIAL_NAMES} in {root}", ()
    lines = read_names(source)
    if source == official:  # columns Idx, Ratio, Train, Val, Stuff, Name
        lines = [row.split("\t")[-1].strip() for row in lines[1:]]
    return str(source), tuple(lines)


LAYOUT = Layout(_pairs, _classes, "training", "validation")

"""Public data sets in the layouts of the recipes for small data."""

from pathlib import Path

import numpy as np
from PIL import Image

from ppma.data.converters.target import Instance, Target

PET, BACKGROUND, BORDER = 1, 2, 3  # values of a trimap
SPECIES = ("cat", "dog")


def cifar10_folder(source, root, count):
    """`count` training images of CIFAR-10's binary version, as CLASS/NUMBER.png."""
    classes = (Path(source) / "batches.meta.txt").read_text().split()
    records = np.fromfile(Path(source) / "data_batch_1.bin", np.uint8).reshape(-1, 1 + 3 * 32 * 32)[:count]
    for number, record in enumerate(records):
        folder = Path(root) / classes[record[0]]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(record[1:].reshape(3, 32, 32).transpose(1, 2, 0)).save(folder / f"{number}.png")


def pets_labels(source, root, count):
    """`count` images of Oxford-IIIT Pet with label maps: background, pet, and the border ignored."""
    values = np.full(256, 255, np.uint8)
    values[[BACKGROUND, PET]] = 0, 1
    for folder in ("images", "labels"):
        (Path(root) / folder).mkdir(parents=True)
    (Path(root) / "classes.txt").write_text("background\npet\n")
    for name, _ in _pets(source, count):
        image, trimap = _open(source, name)
        image.save(Path(root) / "images" / f"{name}.jpg", quality=95)
        Image.fromarray(values[trimap]).save(Path(root) / "labels" / f"{name}.png")


def pets_coco(source, root, count):
    """`count` images of Oxford-IIIT Pet in COCO's layout, each pet with its mask and the box around it."""
    samples = []
    for name, species in _pets(source, count):
        mask = _open(source, name)[1] == PET
        rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
        left, top = int(columns[0]), int(rows[0])
        box = (left, top, int(columns[-1]) + 1 - left, int(rows[-1]) + 1 - top)
        samples.append((Path(source) / "images" / f"{name}.jpg", [Instance(species, box, mask=mask)]))
    with Target(Path(root)) as target:
        target.add_instances("train", SPECIES, samples)


def _pets(source, count):
    """Names and species of images that have a trimap with a pet, evenly spread over the breeds."""
    lines = (Path(source) / "annotations" / "trainval.txt").read_text().splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    found = [(name, int(species) - 1) for name, _, species, _ in rows if _has_pet(source, name)]
    return found[:: max(1, len(found) // count)][:count]


def _has_pet(source, name):
    image, trimap = (Path(source) / part for part in (f"images/{name}.jpg", f"annotations/trimaps/{name}.png"))
    return image.is_file() and trimap.is_file() and bool((np.asarray(Image.open(trimap)) == PET).any())


def _open(source, name):
    image = Image.open(Path(source) / "images" / f"{name}.jpg").convert("RGB")
    trimap = np.asarray(Image.open(Path(source) / "annotations" / "trimaps" / f"{name}.png"))
    assert trimap.shape == image.size[::-1]
    return image, trimap

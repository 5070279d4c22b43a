"""Cityscapes as distributed, converted to label maps and COCO files."""

import json
import re

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as rle

from ppma.data.cityscapes import CLASSES
from ppma.data.converters import CONVERTERS, convert
from ppma.data.segmentation import SegmentationDataConfig, SegmentationImages
from ppma_cli import main
from ppma_cli.data import LAYOUTS

NAME = "ulm_000000_000019"


def write_cityscapes(root, split="val"):
    """Ids: a column of each from 0 to 33; two cars, a group of persons and a trailer (ignored) in the instance map."""
    for folder in ("leftImg8bit", "gtFine"):
        (root / folder / split / "ulm").mkdir(parents=True)
    Image.new("RGB", (34, 10)).save(root / "leftImg8bit" / split / "ulm" / f"{NAME}_leftImg8bit.png")
    ids = np.tile(np.arange(34, dtype=np.uint8), (10, 1))
    Image.fromarray(ids).save(root / "gtFine" / split / "ulm" / f"{NAME}_gtFine_labelIds.png")
    objects = np.zeros((10, 34), np.uint16)
    objects[2:5, 3:9], objects[6:8, 20:30], objects[0, 0], objects[9, 9] = 26000, 26001, 24, 30000
    Image.fromarray(objects).save(root / "gtFine" / split / "ulm" / f"{NAME}_gtFine_instanceIds.png")
    return root


def test_layouts_of_command():
    assert tuple(CONVERTERS) == LAYOUTS


def test_label_maps(tmp_path):
    convert("cityscapes", write_cityscapes(tmp_path / "source"), tmp_path / "out")
    data = SegmentationDataConfig(root=str(tmp_path / "out"), name="folder")
    images = SegmentationImages(data, "val")
    names = [images.classes[label] if label != 255 else None for label in images[0][1][0].tolist()]
    assert images.classes == CLASSES
    assert [names[identity] for identity in (7, 13, 17, 24, 26, 28, 31, 33)] == [
        "road",
        "fence",
        "pole",
        "person",
        "car",
        "bus",
        "train",
        "bicycle",
    ]
    assert [identity for identity, name in enumerate(names) if name is None] == [
        *range(7), 9, 10, 14, 15, 16, 18, 29, 30
    ]  # fmt: skip


def test_instances(tmp_path):
    lines = convert("cityscapes", write_cityscapes(tmp_path / "source"), tmp_path / "out")
    assert lines == ["labels/val: 1 label maps of 19 classes", "val2017: 1 images, 3 instances of 8 classes"]
    contents = json.loads((tmp_path / "out" / "annotations" / "instances_val2017.json").read_text())
    names = {one["id"]: one["name"] for one in contents["categories"]}
    assert list(names.values()) == ["person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"]
    group, first, second = contents["annotations"]
    assert [(names[one["category_id"]], one["iscrowd"]) for one in (group, first, second)] == [
        ("person", 1),
        ("car", 0),
        ("car", 0),
    ]
    assert (first["bbox"], first["area"], second["bbox"]) == ([3, 2, 6, 3], 18, [20, 6, 10, 2])
    assert rle.decode(first["segmentation"])[2:5, 3:9].sum() == 18


def test_images_hard_linked(tmp_path):
    """The image of both layouts is stored once."""
    convert("cityscapes", write_cityscapes(tmp_path / "source"), tmp_path / "out")
    one = tmp_path / "out" / "images" / "val" / f"{NAME}.png"
    other = tmp_path / "out" / "val2017" / f"{NAME}_leftImg8bit.png"
    assert one.samefile(other)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / f"{NAME}_gtFine_labelIds.png").unlink(), "expected a label map .*labelIds.png"),
        (
            lambda folder: Image.new("L", (34, 10), 40).save(folder / f"{NAME}_gtFine_labelIds.png"),
            "labelIds.png: expected ids from 0 to 33, got 40",
        ),
        (lambda folder: (folder / f"{NAME}_gtFine_labelIds.png").write_text(""), "labelIds.png: not an image"),
    ],
)
def test_command_bad_input(tmp_path, capsys, spoil, message):
    source = write_cityscapes(tmp_path / "source")
    spoil(source / "gtFine" / "val" / "ulm")
    assert main(["data", "convert", "cityscapes", str(source), str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(message, err)
    assert not (tmp_path / "out").exists()


def test_command(tmp_path, capsys):
    source, out = write_cityscapes(tmp_path / "source"), tmp_path / "out"
    assert main(["data", "convert", "cityscapes", str(source), str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{out}: labels/val: 1 label maps of 19 classes"


@pytest.mark.parametrize("source", ["empty", "nowhere"])
def test_command_nothing_found(tmp_path, capsys, source):
    (tmp_path / "empty").mkdir()
    assert main(["data", "convert", "cityscapes", str(tmp_path / source), str(tmp_path / "out")]) == 2
    assert "ppma data: source: expected" in capsys.readouterr().err

"""Pascal VOC's layout, converted to COCO files and label maps."""

import json

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as rle

from ppma.data.converters import convert
from ppma.data.converters.voc import CLASSES
from ppma.data.segmentation import SegmentationDataConfig, SegmentationImages

XML = """<annotation><size><width>{width}</width><height>20</height><depth>3</depth></size>
<object><name>{name}</name><difficult>0</difficult>
<bndbox><xmin>{xmin}</xmin><ymin>3</ymin><xmax>14</xmax><ymax>10</ymax></bndbox></object>
<object><name>dog</name><difficult>1</difficult>
<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>40</xmax><ymax>20</ymax></bndbox></object></annotation>"""


def write_voc(root, name="a", *, width=40, xmin="5", label="cat"):
    """An image of 40 x 20 pixels with two objects: pixels 5 to 14 and 3 to 10, counted from 1, and all of it."""
    for folder in ("JPEGImages", "Annotations", "SegmentationClass", "SegmentationObject", "ImageSets/Main"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 20)).save(root / "JPEGImages" / f"{name}.jpg")
    (root / "Annotations" / f"{name}.xml").write_text(XML.format(width=width, xmin=xmin, name=label))
    for folder, values in (("SegmentationClass", (8, 255, 12)), ("SegmentationObject", (1, 255, 2))):
        labels = np.full((20, 40), values[2], np.uint8)
        labels[2:10, 4:14], labels[2, 4] = values[0], values[1]
        picture = Image.fromarray(labels)
        picture.putpalette([value for index in range(256) for value in (index, 0, 255 - index)])
        picture.save(root / folder / f"{name}.png")
    return root


def instances(dest, split):
    return json.loads((dest / "annotations" / f"instances_{split}.json").read_text())


def test_boxes_and_masks(tmp_path):
    source = write_voc(tmp_path / "voc")
    lines = convert("voc", source, tmp_path / "out")
    assert lines == ["train2017: 1 images, 2 instances of 20 classes", "labels/train: 1 label maps of 21 classes"]
    contents = instances(tmp_path / "out", "train2017")
    assert [one["name"] for one in contents["categories"]] == list(CLASSES)
    cat, dog = contents["annotations"]
    assert (cat["bbox"], cat["category_id"], cat["iscrowd"]) == ([4, 2, 10, 8], 1 + CLASSES.index("cat"), 0)
    assert (dog["bbox"], dog["iscrowd"]) == ([0, 0, 40, 20], 1)  # difficult
    mask = rle.decode(cat["segmentation"])
    expected = np.zeros((20, 40), np.uint8)
    expected[2:10, 4:14] = 1
    expected[2, 4] = 0
    assert np.array_equal(mask, expected)
    assert cat["area"] == 79


def test_label_maps(tmp_path):
    source = write_voc(tmp_path / "voc")
    for name in "bcd":
        write_voc(source, name)
    (source / "ImageSets" / "Segmentation").mkdir()
    (source / "ImageSets" / "Segmentation" / "train.txt").write_text("a\nb\n")
    (source / "ImageSets" / "Segmentation" / "val.txt").write_text("c\n")
    convert("voc", source, tmp_path / "out")
    data = SegmentationDataConfig(root=str(tmp_path / "out"), name="folder")
    train, val = SegmentationImages(data, "train"), SegmentationImages(data, "val")
    assert [path.name for path, _ in (*train.pairs, *val.pairs)] == ["a.jpg", "b.jpg", "c.jpg"]
    labels = val[0][1]
    assert [int(labels[spot]) for spot in ((0, 0), (2, 4), (5, 5))] == [12, 255, 8]
    assert (val.classes[0], val.classes[8], val.classes[12]) == ("background", "cat", "dog")


def test_splits_and_images_without_masks(tmp_path):
    source = write_voc(tmp_path / "voc")
    for name in "bc":
        write_voc(source, name)
    (source / "SegmentationObject" / "c.png").unlink()
    (source / "ImageSets" / "Main" / "train.txt").write_text("a\n")
    (source / "ImageSets" / "Main" / "val.txt").write_text("b  1\nc -1\n")
    lines = convert("voc", source, tmp_path / "out")
    assert lines[0] == "1 images without a map in SegmentationObject: left out of the instances"
    assert [one["file_name"] for one in instances(tmp_path / "out", "val2017")["images"]] == ["b.jpg"]


def test_boxes_only_with_own_classes(tmp_path):
    source = write_voc(tmp_path / "voc", label="zebra")
    for folder in ("SegmentationClass", "SegmentationObject"):
        (source / folder / "a.png").unlink()
        (source / folder).rmdir()
    (line,) = convert("voc", source, tmp_path / "out")
    assert line.startswith("train2017: 1 images, 2 instances of 2 classes; 2 have a box only")
    assert [one["name"] for one in instances(tmp_path / "out", "train2017")["categories"]] == ["dog", "zebra"]


def spoil_xml(source):
    (source / "Annotations" / "a.xml").write_text("<annotation>")


def spoil_label(source):
    Image.fromarray(np.full((20, 40), 21, np.uint8)).save(source / "SegmentationClass" / "a.png")


def spoil_map_size(source):
    Image.fromarray(np.zeros((20, 30), np.uint8)).save(source / "SegmentationClass" / "a.png")


@pytest.mark.parametrize(
    ("changes", "spoil", "message"),
    [
        ({"width": 50}, None, "a.xml: expected the size of the image, 40 x 20, got 50 x 20"),
        ({"xmin": "15"}, None, "a.xml: object 1: expected a box inside the image of 40 x 20 pixels"),
        ({"xmin": "left"}, None, "a.xml: object 1: expected a number as bndbox/xmin, got 'left'"),
        ({"xmin": "inf"}, None, "a.xml: object 1: expected a number as bndbox/xmin, got 'inf'"),
        ({"label": ""}, None, "a.xml: object 1: expected a name, found none"),
        ({}, spoil_xml, "a.xml: expected XML"),
        ({}, spoil_label, "SegmentationClass/a.png: label 21 out of range, expected 0 to 20 for 21 classes"),
        ({}, spoil_map_size, "a.jpg: 40 x 20 pixels, but its label map has 30 x 20"),
        ({}, lambda source: (source / "JPEGImages" / "a.jpg").unlink(), "expected an image .*a.jpg, found none"),
    ],
)
def test_bad_input(tmp_path, changes, spoil, message):
    source = write_voc(tmp_path / "voc", **changes)
    if spoil:
        spoil(source)
    with pytest.raises(ValueError, match=message):
        convert("voc", source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["voc"]


def test_object_map_of_another_size(tmp_path):
    source = write_voc(tmp_path / "voc")
    Image.fromarray(np.ones((20, 30), np.uint8)).save(source / "SegmentationObject" / "a.png")
    with pytest.raises(ValueError, match=r"a.jpg: 40 x 20 pixels, but the mask of an instance has 30 x 20"):
        convert("voc", source, tmp_path / "out")


def test_not_voc(tmp_path):
    with pytest.raises(ValueError, match="expected a folder Annotations or SegmentationClass in"):
        convert("voc", tmp_path, tmp_path / "out")

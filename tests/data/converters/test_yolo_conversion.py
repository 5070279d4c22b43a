"""YOLO's layout, converted to COCO's."""

import json

import pytest
from PIL import Image

from ppma.data.coco import CocoDataConfig, CocoInstances
from ppma.data.converters import convert


def write_yolo(root, labels, *, described=True, split="train"):
    """Images of 40 x 20 pixels with these lines of labels."""
    for folder in ("images", "labels"):
        (root / folder / split).mkdir(parents=True)
    for name, lines in labels.items():
        Image.new("RGB", (40, 20)).save(root / "images" / split / f"{name}.jpg")
        if lines is not None:
            (root / "labels" / split / f"{name}.txt").write_text(lines)
    if described:
        (root / "data.yaml").write_text("path: /elsewhere\ntrain: images/train\nval: images/val\nnames: [cat, dog]\n")
    return root


def annotations(dest, split="train2017"):
    contents = json.loads((dest / "annotations" / f"instances_{split}.json").read_text())
    return contents, contents["annotations"]


def test_boxes_and_polygons(tmp_path):
    source = write_yolo(tmp_path / "yolo", {"a": "1 0.5 0.5 0.25 0.5\n0 0.25 0 0.75 0 0.75 1 0.25 1\n", "b": None})
    write_yolo(source, {"c": "0 0.5 0.5 1 1"}, split="val")
    lines = convert("yolo", source, tmp_path / "coco")
    assert lines == [
        "train2017: 2 images, 2 instances of 2 classes; 1 have a box only, Mask R-CNN also needs outlines",
        "val2017: 1 images, 1 instances of 2 classes; 1 have a box only, Mask R-CNN also needs outlines",
    ]
    contents, (box, outline) = annotations(tmp_path / "coco")
    assert contents["categories"] == [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    assert contents["images"][0] == {"id": 1, "file_name": "a.jpg", "width": 40, "height": 20}
    assert box == {"id": 1, "image_id": 1, "category_id": 2, "iscrowd": 0, "bbox": [15, 5, 10, 10], "area": 100}
    assert (outline["bbox"], outline["area"]) == ([10, 0, 20, 20], 400)
    assert outline["segmentation"] == [[10, 0, 30, 0, 30, 20, 10, 20]]
    assert (tmp_path / "coco" / "train2017" / "a.jpg").read_bytes() == (source / "images/train/a.jpg").read_bytes()


def test_polygons_readable(tmp_path):
    labels = {str(number): "1 0.25 0 0.75 0 0.75 1 0.25 1" for number in range(10)}
    source = write_yolo(tmp_path / "yolo", labels)
    (source / "data.yaml").write_text("train: images/train\nnames: [cat, dog]")
    convert("yolo", source, tmp_path / "coco", link=True)
    data = CocoDataConfig(root=str(tmp_path / "coco"))
    with pytest.warns(UserWarning, match="validating on 1 of 10"):
        image, target = CocoInstances(data, "val2017")[0]
    assert image.shape == (3, 20, 40)
    assert target["annotations"][0]["bbox"] == [10, 0, 20, 20]
    assert (tmp_path / "coco" / "train2017" / "3.jpg").is_symlink()


def test_without_yaml(tmp_path):
    source = write_yolo(tmp_path / "yolo", {"a": "0 0.5 0.5 0.5 0.5"}, described=False, split="")
    (source / "classes.txt").write_text("cat\n")
    assert convert("yolo", source, tmp_path / "coco")[0].startswith("train2017: 1 images, 1 instances of 1 classes")


def test_split_folders_outside_images(tmp_path):
    """train/images and train/labels, with paths that begin with ../"""
    source = tmp_path / "yolo"
    for split in ("train", "valid"):
        write_yolo(source / split, {"a": "1 0.5 0.5 0.5 0.5"}, described=False, split="")
    yaml = source / "data.yaml"
    yaml.write_text("train: ../train/images\nval: ../valid/images\nnames: {0: cat, 1: dog}")
    assert [line.split(",")[0] for line in convert("yolo", yaml, tmp_path / "coco")] == [
        "train2017: 1 images",
        "val2017: 1 images",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2 0.5 0.5 0.5 0.5", "a.txt:1: expected a class from 0 to 1, got 2"),
        ("nan 0.5 0.5 0.5 0.5", "a.txt:1: expected a class from 0 to 1, got nan"),
        ("0 0.5 0.5 0.5", "a.txt:1: expected 4 numbers .a box. or 3 and more points, got 3 numbers"),
        ("0 0.5 0.5 0.5 0.5 0.9", "a.txt:1: expected 4 numbers .* got 5 numbers"),
        ("0 0.5 0.5 0.5 1.5", "a.txt:1: expected fractions of the image from 0 to 1, got 1.5"),
        ("0 0.5 0.5 0 0.5", "a.txt:1: expected a box with an area, got 0 x 0.5"),
        ("cat 0.5 0.5 0.5 0.5", "a.txt:1: expected numbers, got 'cat 0.5"),
    ],
)
def test_bad_line(tmp_path, line, message):
    source = write_yolo(tmp_path / "yolo", {"a": line})
    (source / "data.yaml").write_text("train: images/train\nnames: [cat, dog]")
    with pytest.raises(ValueError, match=message):
        convert("yolo", source, tmp_path / "coco")
    assert [path.name for path in tmp_path.iterdir()] == ["yolo"]  # nothing is left


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("train: nowhere\nnames: [cat]", "expected a folder or a list of images at .*nowhere, found none"),
        ("train: images/train", "data.yaml: expected the keys names and train"),
        ("train: images/train\nnames: {1: cat}", "names: expected a list of class names"),
        ("[", "data.yaml: expected YAML"),
        ("train: images/train\nnames: [cat, cat]", "expected different class names, found 'cat' more than once"),
    ],
)
def test_bad_description(tmp_path, yaml, message):
    source = write_yolo(tmp_path / "yolo", {"a": ""})
    (source / "data.yaml").write_text(yaml)
    with pytest.raises(ValueError, match=message):
        convert("yolo", source, tmp_path / "coco")


def test_broken_image_and_missing_labels(tmp_path):
    source = write_yolo(tmp_path / "yolo", {"a": None}, split="val")
    (source / "data.yaml").write_text("train: images/val\nnames: [cat]")
    with pytest.raises(ValueError, match=r"expected label files of the train split such as .*labels/val/a.txt"):
        convert("yolo", source, tmp_path / "coco")
    (source / "labels" / "val" / "a.txt").touch()
    (source / "images" / "val" / "a.jpg").write_text("no image")
    with pytest.raises(ValueError, match=r"a.jpg: not an image"):
        convert("yolo", source, tmp_path / "coco")


def test_dest_not_empty(tmp_path):
    source = write_yolo(tmp_path / "yolo", {"a": "0 0.5 0.5 0.5 0.5"})
    (source / "data.yaml").write_text("train: images/train\nnames: [cat]")
    (tmp_path / "coco").mkdir()
    convert("yolo", source, tmp_path / "coco")  # an empty folder is used
    before = (tmp_path / "coco" / "annotations" / "instances_train2017.json").read_bytes()
    with pytest.raises(ValueError, match="dest: expected a new or empty folder, got"):
        convert("yolo", source, tmp_path / "coco")
    assert (tmp_path / "coco" / "annotations" / "instances_train2017.json").read_bytes() == before

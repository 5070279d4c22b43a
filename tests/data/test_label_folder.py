"""CamVid-like folders, and validation splits of dense data."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

from ppma.data.coco import CocoDataConfig, CocoInstances
from ppma.data.coco_transforms import CocoAugmentConfig, train_transform
from ppma.data.scenes_files import write_scenes
from ppma.data.segmentation import SegmentationDataConfig, SegmentationImages

CLASSES = ("road", "sky", "car")


def write_folder(root, names, *, maps="labels", split="", ending=""):
    """Images of one colour with label maps: the value of pixel (0, 0) is 2, of (0, 1) 255, of all others 1."""
    for folder in ("images", maps):
        (root / folder / split).mkdir(parents=True)
    (root / "classes.txt").write_text("\n".join(CLASSES))
    values = np.ones((6, 8), np.uint8)
    values[0, 0], values[0, 1] = 2, 255
    for number, name in enumerate(names):
        Image.new("RGB", (8, 6), (number, 0, 0)).save(root / "images" / split / f"{name}.png")
        Image.fromarray(values).save(root / maps / split / f"{name}{ending}.png")
    return SegmentationDataConfig(root=str(root), name="folder")


def stems(images):
    return {path.stem for path, _ in images.pairs}


@pytest.mark.parametrize("maps", ["labels", "masks", "annotations"])
@pytest.mark.parametrize("ending", ["", "_L", "_P"])
def test_folder_without_splits(tmp_path, maps, ending):
    data = write_folder(tmp_path, [f"frame{number:02d}" for number in range(20)], maps=maps, ending=ending)
    train = SegmentationImages(data, "train")
    message = r"no folder 'val' in .*images: validating on 2 of 20 training images, a random split of 10% with seed 0"
    with pytest.warns(UserWarning, match=message):
        val = SegmentationImages(data, "val")
    assert (train.classes, len(train), len(val)) == (CLASSES, 18, 2)
    assert not stems(train) & stems(val)
    assert stems(train) | stems(val) == {f"frame{number:02d}" for number in range(20)}
    assert val[0][1][0, :3].tolist() == [2, 255, 1]


def test_folder_split_repeatable(tmp_path):
    data = write_folder(tmp_path, range(10))
    with pytest.warns(UserWarning, match="validating on 1 of 10"):
        assert stems(SegmentationImages(data, "val")) == stems(SegmentationImages(data, "val"))


def test_folder_with_splits(tmp_path):
    data = write_folder(tmp_path, "abc", split="train")
    write_folder(tmp_path, "de", split="valid")
    assert stems(SegmentationImages(data, "train")) == set("abc")
    assert stems(SegmentationImages(data, "val")) == set("de")


def test_folder_training_split_only(tmp_path):
    data = write_folder(tmp_path, range(10), split="training")
    with pytest.warns(UserWarning, match="validating on 1 of 10"):
        assert len(SegmentationImages(data, "val")) == 1
    assert len(SegmentationImages(data, "train")) == 9


@pytest.mark.parametrize(
    ("spoil", "split", "message"),
    [
        (lambda root: (root / "classes.txt").unlink(), "train", r"data.classes: expected names, or classes.txt in"),
        (lambda root: (root / "labels").rename(root / "other"), "train", r"expected a folder .*labels, found none"),
        (lambda root: (root / "images").rename(root / "other"), "train", r"expected a folder .*images, found none"),
        (lambda root: None, "test", r"expected a folder .*test, found none"),
        (lambda root: [path.unlink() for path in (root / "images").iterdir()], "val", r"found neither"),
    ],
)
def test_folder_refused(tmp_path, spoil, split, message):
    data = write_folder(tmp_path, range(10))
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message):
        SegmentationImages(data, split)


def test_folder_too_few_to_split(tmp_path):
    with pytest.raises(ValueError, match=r"data.val_fraction: 0.1 of 3 images leaves none to validate on"):
        SegmentationImages(write_folder(tmp_path, "abc"), "train")


def test_binary_mask_warning(tmp_path):
    data = write_folder(tmp_path, "ab", split="val")
    (tmp_path / "classes.txt").write_text("background\nnucleus")
    for name in "ab":
        values = np.zeros((6, 8), np.uint8)
        values[2:4, 2:4] = 255
        Image.fromarray(values).save(tmp_path / "labels" / "val" / f"{name}.png")
    with pytest.warns(UserWarning, match=r"no pixel of class 'nucleus', but ignored ones .255.; .* set data.labels to"):
        SegmentationImages(data, "val")
    binary = SegmentationImages(dataclasses.replace(data, labels="binary"), "val")
    assert (binary.counts.pixels, binary.counts.ignored) == ((2 * 44, 2 * 4), 0)
    assert binary[0][1][2, 1:3].tolist() == [0, 1]


def test_binary_values(tmp_path):
    data = dataclasses.replace(write_folder(tmp_path, "a", split="val"), labels="binary")
    with pytest.raises(ValueError, match=r"data.labels: expected 2 classes with binary, found 3"):
        SegmentationImages(data, "val")
    (tmp_path / "classes.txt").write_text("background\nnucleus")
    with pytest.raises(
        ValueError, match=r"label 2 out of range, expected 0 and 255 .or 1. for 2 classes, none ignored"
    ):
        SegmentationImages(data, "val")
    Image.new("1", (8, 6), 1).save(tmp_path / "labels" / "val" / "a.png")
    assert SegmentationImages(data, "val").counts.pixels == (0, 48)


def test_coco_without_validation(tmp_path):
    write_scenes(tmp_path / "scenes", train=20, val=1, size=32)
    (tmp_path / "scenes" / "annotations" / "instances_val2017.json").unlink()
    data = CocoDataConfig(root=str(tmp_path / "scenes"))
    transform = train_transform(CocoAugmentConfig(short_sides=(32,), long_side=32))
    train = CocoInstances(data, "train2017", transform)
    with pytest.warns(UserWarning, match=r"no .*instances_val2017.json: validating on 2 of 20 training images"):
        val = CocoInstances(data, "val2017")
    assert set(train.ids) | set(val.ids) == set(range(1, 21))
    assert (len(train), len(val), train.left_out.total(), val.left_out.total()) == (18, 2, 0, 0)
    image, target = val[0]
    assert torch.is_tensor(image)
    assert {one["image_id"] for one in target["annotations"]} == {target["image_id"]}

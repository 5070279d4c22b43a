"""Images with instances in COCO's layout, and what is said about those that are not right."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from ppma.config import ConfigError
from ppma.data.coco import CocoDataConfig, CocoInstances
from ppma.data.coco_transforms import CocoAugmentConfig, RandomSizeCrop, train_transform
from ppma.data.scenes import compose
from ppma.data.scenes_files import write_scenes
from ppma.engine.task import BrokenSampleError

PLAIN = train_transform(CocoAugmentConfig(short_sides=(64,), long_side=64, hflip=0))
SQUARE = [[4.0, 4, 20, 4, 20, 20, 4, 20]]


@pytest.fixture
def scenes(tmp_path):
    write_scenes(tmp_path / "scenes", train=4, val=2, size=64)
    return tmp_path / "scenes"


def change(root, edit, split="val2017"):
    """Edit the annotations of a split."""
    path = root / "annotations" / f"instances_{split}.json"
    contents = json.loads(path.read_text())
    edit(contents)
    path.write_text(json.dumps(contents))


def small_set(root, annotations, images=1):
    """A training split of so many grey images with these annotations."""
    (root / "train2017").mkdir(parents=True)
    (root / "annotations").mkdir()
    for number in range(1, images + 1):
        Image.new("RGB", (40, 30), "grey").save(root / "train2017" / f"{number}.png")
    contents = {
        "images": [{"id": n, "file_name": f"{n}.png", "width": 40, "height": 30} for n in range(1, images + 1)],
        "categories": [{"id": 7, "name": "cat"}, {"id": 3, "name": "ant"}],
        "annotations": [
            {"id": n, "image_id": 1, "category_id": 7, "iscrowd": 0, "bbox": [4, 4, 16, 16], "segmentation": SQUARE}
            | annotation
            for n, annotation in enumerate(annotations)
        ],
    }
    (root / "annotations" / "instances_train2017.json").write_text(json.dumps(contents))
    return CocoDataConfig(root=str(root))


def test_samples_are_the_scenes(scenes):
    data = CocoDataConfig(root=str(scenes))
    train = CocoInstances(data, "train2017", PLAIN)
    assert train.classes == tuple("0123456789")
    assert len(train) == 4
    for index in range(4):
        scene = compose("train", index, size=64)
        image, target = train[index]
        assert (image.shape, image.dtype) == ((3, 64, 64), torch.float32)
        assert 0 <= image.min() <= image.max() <= 1
        assert np.array_equal(target["boxes"], scene.boxes)
        assert np.array_equal(target["labels"], scene.labels + 1)
        assert np.array_equal(target["masks"], scene.masks)
    image, truth = CocoInstances(data, "val2017")[1]
    assert image.shape == (3, 64, 64)
    assert truth["image_id"] == 2
    assert len(truth["annotations"]) == len(compose("val", 1, size=64).labels)


def test_labels_follow_the_ids_of_categories_or_the_configured_names(tmp_path):
    data = small_set(tmp_path, [{"category_id": 7}, {"category_id": 3}])
    every = CocoInstances(data, "train2017", PLAIN)
    assert every.classes == ("ant", "cat")
    assert every[0][1]["labels"].tolist() == [2, 1]
    only = CocoInstances(CocoDataConfig(root=str(tmp_path), classes=("cat",)), "train2017", PLAIN)
    assert only[0][1]["labels"].tolist() == [1]
    with pytest.raises(ValueError, match=r"data.classes: dog not among the categories"):
        CocoInstances(CocoDataConfig(root=str(tmp_path), classes=("dog",)), "train2017", PLAIN)
    with pytest.raises(ConfigError, match="classes: expected different names"):
        CocoDataConfig(root="", classes=("cat", "cat"))


def test_what_cannot_be_learned_is_counted_and_left_out(tmp_path):
    wrong = [
        {"bbox": [4, 4, 0, 16]},  # no width
        {"bbox": [50, 4, 9, 9]},  # outside
        {"bbox": [1, 2]},
        {"bbox": [0, 0, float("nan"), 9]},
        {"iscrowd": 1, "segmentation": {"size": [30, 40], "counts": [0, 10, 1190]}},
        {"segmentation": [[1, 2]]},
        {"image_id": 99},
    ]
    data = small_set(tmp_path, [{}, *wrong], images=3)
    expected = (
        "left out: 4 degenerate boxes, 1 crowd regions, 1 instances without an outline, "
        "1 instances of unknown images, 2 images without instances"
    )
    with pytest.warns(UserWarning, match=expected):
        train = CocoInstances(data, "train2017", PLAIN)
    assert len(train) == 1
    assert train[0][1]["boxes"].shape == (1, 4)
    with pytest.warns(UserWarning, match="left out: 4 degenerate boxes"):
        held_out = CocoInstances(data, "train2017")
    assert len(held_out) == 3  # an image in which nothing is to be found counts
    assert [one["iscrowd"] for one in held_out[0][1]["annotations"]] == [0, 1]  # and so does a crowd
    assert held_out[1][1]["annotations"] == []


def test_boxes_are_cut_at_the_border_of_the_image(tmp_path):
    data = small_set(tmp_path, [{"bbox": [-5, 20, 20, 100]}])
    (box,) = CocoInstances(data, "train2017", PLAIN)[0][1]["boxes"].tolist()
    assert box == pytest.approx([0, 20 * 48 / 30, 15 * 64 / 40, 48])  # scaled from 40 x 30 to 64 x 48


def test_what_is_missing_or_no_annotation_file_is_an_error(scenes, tmp_path):
    data = CocoDataConfig(root=str(scenes))
    with pytest.raises(ValueError, match=r"data.root: expected the annotations in .*instances_test2017.json"):
        CocoInstances(data, "test2017")
    path = scenes / "annotations" / "instances_val2017.json"
    for text in ("{", "[]", '{"images": 3}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"instances_val2017.json: (not an annotation file|expected categories)"):
            CocoInstances(data, "val2017")
    path.write_text('{"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}]}')
    with pytest.raises(ValueError, match="expected images with instances, found none"):
        CocoInstances(data, "val2017")
    (scenes / "train2017").rename(scenes / "elsewhere")
    with pytest.raises(ValueError, match=r"expected the images in .*train2017, found no such folder"):
        CocoInstances(data, "train2017")


def test_a_category_that_does_not_exist_is_an_error(scenes):
    change(scenes, lambda contents: contents["annotations"][0].update(category_id=99))
    with pytest.raises(ValueError, match="annotation 1 has category_id 99, which is none of the 10 categories"):
        CocoInstances(CocoDataConfig(root=str(scenes)), "val2017")


def test_broken_images_are_named(scenes):
    change(scenes, lambda contents: contents["images"][0].update(width=65))
    held_out = CocoInstances(CocoDataConfig(root=str(scenes)), "val2017")
    with pytest.raises(BrokenSampleError, match=r"000001.jpg: 64 x 64 pixels, but the annotations are for 65 x 64"):
        held_out[0]
    (scenes / "val2017" / "000002.jpg").write_bytes(b"broken")
    with pytest.raises(BrokenSampleError, match=r"000002\.jpg"):
        held_out[1]
    (scenes / "val2017" / "000002.jpg").unlink()
    with pytest.raises(BrokenSampleError, match=r"000002\.jpg"):
        held_out[1]


def test_multi_scale_with_crops_keeps_boxes_on_their_masks(scenes):
    augment = CocoAugmentConfig(
        short_sides=(48, 64, 80), long_side=100, crop_short_sides=(60, 90), crop_sides=(40, 56), hflip=0.5
    )
    train = CocoInstances(CocoDataConfig(root=str(scenes)), "train2017", train_transform(augment))
    torch.manual_seed(0)
    sides = set()
    for index in [0, 1, 2, 3] * 8:
        image, target = train[index]
        sides.add(min(image.shape[1:]))
        assert max(image.shape[1:]) <= 100
        assert len(target["boxes"]) == len(target["labels"]) == len(target["masks"])
        assert target["masks"].shape[1:] == image.shape[1:]
        for box, mask in zip(target["boxes"], target["masks"], strict=True):
            rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
            if len(rows):
                inside = torch.tensor([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
                # Nearest neighbours are rounded to pixels twice, by 90 / 64 x 80 / 40 at most each time.
                assert (inside[:2] >= box[:2] - 3).all()
                assert (inside[2:] <= box[2:] + 3).all()
    assert {48, 64, 80} <= sides


def test_crops_have_the_sides_they_should():
    crop = RandomSizeCrop((20, 30))
    image = tv_tensors.Image(torch.zeros(3, 25, 90))
    shapes = {tuple(crop(image).shape[1:]) for _ in range(50)}
    assert {height for height, _ in shapes} <= set(range(20, 26))
    assert {width for _, width in shapes} <= set(range(20, 31))
    assert len(shapes) > 10

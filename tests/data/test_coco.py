"""Instance annotations in COCO's layout, and the messages about invalid ones."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as rle
from torchvision import tv_tensors

from ppma.config import ConfigError
from ppma.data.coco import CocoDataConfig, CocoInstances
from ppma.data.coco_file import outline_mask, run_lengths
from ppma.data.coco_transforms import CocoAugmentConfig, RandomSizeCrop, train_transform
from ppma.data.errors import BrokenSampleError
from ppma.data.scenes import compose
from ppma.data.scenes_files import write_scenes

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
    (root / "annotations" / "instances_val2017.json").touch()  # without it, the training images would be split
    return CocoDataConfig(root=str(root))


def test_samples_match_scenes(scenes):
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


def test_labels_by_id_or_config(tmp_path):
    data = small_set(tmp_path, [{"category_id": 7}, {"category_id": 3}])
    every = CocoInstances(data, "train2017", PLAIN)
    assert every.classes == ("ant", "cat")
    assert every[0][1]["labels"].tolist() == [2, 1]
    only = CocoInstances(CocoDataConfig(root=str(tmp_path), classes=("cat",)), "train2017", PLAIN)
    assert only[0][1]["labels"].tolist() == [1]
    with pytest.raises(ValueError, match=r"data.classes: expected categories of .*, got dog"):
        CocoInstances(CocoDataConfig(root=str(tmp_path), classes=("dog",)), "train2017", PLAIN)
    with pytest.raises(ConfigError, match="classes: expected different names"):
        CocoDataConfig(root="", classes=("cat", "cat"))


def test_invalid_annotations_counted(tmp_path):
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
        "left out: 4 degenerate boxes (first: annotation 1), 1 crowd regions (first: annotation 5), "
        "1 instances without an outline (first: annotation 6), 1 instances of unknown images (first: annotation 7), "
        "2 images without instances (first: 2.png)"
    )
    with pytest.warns(UserWarning, match=re.escape(expected)):
        train = CocoInstances(data, "train2017", PLAIN)
    assert len(train) == 1
    assert train[0][1]["boxes"].shape == (1, 4)
    with pytest.warns(UserWarning, match="left out: 4 degenerate boxes"):
        held_out = CocoInstances(data, "train2017")
    assert len(held_out) == 3  # an image in which nothing is to be found counts
    assert [one["iscrowd"] for one in held_out[0][1]["annotations"]] == [0, 1]  # and so does a crowd
    assert held_out[1][1]["annotations"] == []


def test_boxes_clipped_to_image(tmp_path):
    data = small_set(tmp_path, [{"bbox": [-5, 20, 20, 100]}])
    (box,) = CocoInstances(data, "train2017", PLAIN)[0][1]["boxes"].tolist()
    assert box == pytest.approx([0, 20 * 48 / 30, 15 * 64 / 40, 48])  # scaled from 40 x 30 to 64 x 48


def test_errors_missing_or_invalid_file(scenes, tmp_path):
    data = CocoDataConfig(root=str(scenes))
    with pytest.raises(ValueError, match=r"data.root: expected annotations in .*instances_test2017.json"):
        CocoInstances(data, "test2017")
    path = scenes / "annotations" / "instances_val2017.json"
    for text, said in {
        "": "not a JSON file",
        "{": "not a JSON file",
        "[" * 100_000: "not a JSON file",
        "[]": "expected an object with images, categories, annotations, got a list",
        '{"images": 3}': "expected a list 'images', got 3",
        '{"images": [], "categories": []}': "expected categories, found none",
        '{"images": [], "categories": [{"id": 1, "name": "a"}]}': "expected a list 'annotations', found none",
        '{"images": [7]}': r"images\[0\]: expected an object, got 7",
    }.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"instances_val2017.json: {said}"):
            CocoInstances(data, "val2017")
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match=r"instances_val2017.json: not a JSON file"):
        CocoInstances(data, "val2017")
    path.write_text('{"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}]}')
    with pytest.raises(ValueError, match="expected images with instances, found none"):
        CocoInstances(data, "val2017")
    (scenes / "train2017").rename(scenes / "elsewhere")
    with pytest.raises(ValueError, match=r"expected images in .*train2017, found no such folder"):
        CocoInstances(data, "train2017")


def test_errors_unknown_category(scenes):
    change(scenes, lambda contents: contents["annotations"][0].update(category_id=99))
    with pytest.raises(ValueError, match="annotation 1 has category_id 99, which is none of the 10 categories"):
        CocoInstances(CocoDataConfig(root=str(scenes)), "val2017")


def entry_error(scenes, edit):
    """The line about a changed annotation file."""
    change(scenes, edit)
    with pytest.raises(ValueError, match=r"instances_val2017\.json: ") as caught:
        CocoInstances(CocoDataConfig(root=str(scenes)), "val2017")
    assert "\n" not in str(caught.value)
    return str(caught.value).split("instances_val2017.json: ")[1]


@pytest.mark.parametrize(
    ("entries", "values", "said"),
    [
        ("images", {"width": "64"}, "images[0]: expected a whole number of pixels as 'width', got '64'"),
        ("images", {"height": None}, "images[0]: expected a whole number of pixels as 'height', got None"),
        ("images", {"height": 0}, "images[0]: expected a whole number of pixels as 'height', got 0"),
        ("images", {"width": 63.5}, "images[0]: expected a whole number of pixels as 'width', got 63.5"),
        ("images", {"width": float("nan")}, "images[0]: expected a whole number of pixels as 'width', got nan"),
        ("images", {"file_name": None}, "images[0]: expected text as 'file_name', got None"),
        ("images", {"id": [1]}, "images[0]: expected a whole number or text as 'id', got a list"),
        ("images", {"id": 2}, "images[1]: the id 2 is taken by an earlier entry"),
        ("images", {"id": "2"}, "expected ids that are all numbers or all text, found both"),
        ("categories", {"name": "1"}, "categories[1]: the name '1' is taken by the category with id 1"),
        ("categories", {"name": None}, "categories[0]: expected text as 'name', got None"),
        ("categories", {"name": {}}, "categories[0]: expected text as 'name', got an object"),
        ("categories", {"id": 2}, "categories[1]: the id 2 is taken by an earlier entry"),
        ("annotations", {"iscrowd": "1"}, "annotation 1: expected 0 or 1 as 'iscrowd', got '1'"),
        ("annotations", {"category_id": []}, "annotation 1 has category_id a list, which is none of the 10 categories"),
        (
            "annotations",
            {"segmentation": {"size": [63, 64], "counts": "0"}},
            "annotation 1: expected run lengths of the image's size [64, 64], got [63, 64]",
        ),
        (
            "annotations",
            {"segmentation": {"counts": "0"}},
            "annotation 1: expected run lengths of the image's size [64, 64], got None",
        ),
    ],
)
def test_errors_wrong_entries(scenes, entries, values, said):
    assert entry_error(scenes, lambda contents: contents[entries][0].update(values)) == said


@pytest.mark.parametrize(
    ("entries", "key", "said"),
    [
        ("images", "width", "images[0]: expected a whole number of pixels as 'width', found none"),
        ("images", "file_name", "images[0]: expected text as 'file_name', found none"),
        ("categories", "name", "categories[0]: expected text as 'name', found none"),
        ("annotations", "category_id", "annotation 1 has category_id None, which is none of the 10 categories"),
    ],
)
def test_errors_missing_values(scenes, entries, key, said):
    assert entry_error(scenes, lambda contents: contents[entries][0].pop(key)) == said


def test_errors_wrong_lists(scenes):
    said = entry_error(scenes, lambda contents: contents.update(annotations={"1": {}}))
    assert said == "expected a list 'annotations', got an object"


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ("0", "expected run lengths of 1200 pixels, got 0"),
        ([0, 10, 1191], "expected run lengths of 1200 pixels, got 1201"),
        ([-5, 1205], "expected run lengths"),
        ([1200.5], "expected run lengths"),
        (7, "expected run lengths"),
        ("Po", "expected complete run lengths, got a truncated code"),
        ("\u00e9\u00e9", "expected run lengths, got a damaged code at 'é'"),
        ("o" * 1000, "expected run lengths, got a damaged code at 'o'"),
    ],
)
def test_run_lengths_damaged(tmp_path, counts, said):
    data = small_set(tmp_path, [{"segmentation": {"size": [30, 40], "counts": counts}}])
    for transform in (PLAIN, None):
        images = CocoInstances(data, "train2017", transform)
        with pytest.raises(BrokenSampleError, match=rf"instances_train2017.json: annotation 0: {said}"):
            images[0]


def test_run_lengths_match_pycocotools():
    generator = np.random.default_rng(0)
    for share in (0.02, 0.5, 0.98):
        mask = np.asfortranarray(generator.random((37, 53)) < share).astype(np.uint8)
        encoded = rle.encode(mask)
        described = {"size": [37, 53], "counts": encoded["counts"].decode()}
        assert np.array_equal(outline_mask(described, 37, 53), mask)
        runs = run_lengths(described["counts"], mask.size)
        assert np.array_equal(outline_mask({"size": [37, 53], "counts": runs}, 37, 53), mask)


@pytest.mark.parametrize(
    "polygon",
    [
        [1, 2],
        [4, 4, 20, 4, 20, 20, 4],
        [4, 4, 20, 4, "20", 20],
        [4, 4, 20, float("nan"), 20, 20],
        [0, 0, 1e9, 0, 1, 1],
        5,
    ],
)
def test_polygons_invalid_parts(tmp_path, polygon):
    data = small_set(tmp_path, [{"segmentation": [*SQUARE, polygon]}, {}])
    expected = r"left out: 1 parts of outlines that are no polygons \(first: annotation 0\)"
    with pytest.warns(UserWarning, match=expected):
        masks = CocoInstances(data, "train2017", PLAIN)[0][1]["masks"]
    assert torch.equal(masks[0], masks[1])


def test_errors_boxes_without_masks(tmp_path):
    data = small_set(tmp_path, [{"segmentation": []}, {"segmentation": None}])
    expected = (
        "found none: 2 instances without an outline (first: annotation 0), 1 images without instances (first: 1.png); "
        "Mask R-CNN needs 'segmentation' beside every 'bbox'"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        CocoInstances(data, "train2017", PLAIN)
    with pytest.raises(ValueError, match="Mask R-CNN needs 'segmentation'"):
        CocoInstances(data, "train2017")


def test_crowd_only_images(tmp_path):
    crowd = {"iscrowd": 1, "image_id": 2, "segmentation": {"size": [30, 40], "counts": [0, 10, 1190]}}
    data = small_set(tmp_path, [{}, crowd], images=2)
    with pytest.warns(UserWarning, match="1 crowd regions"):
        assert CocoInstances(data, "train2017", PLAIN).ids == [1]
    held_out = CocoInstances(data, "train2017")
    assert [one["iscrowd"] for one in held_out[1][1]["annotations"]] == [1]
    data = small_set(tmp_path / "crowd", [crowd], images=2)
    with pytest.raises(ValueError, match="expected images with instances, found none"):
        CocoInstances(data, "train2017")


def test_annotation_ids_repeated_or_missing(tmp_path):
    data = small_set(tmp_path, [{"id": 5}, {"id": 5}, {"id": None}])
    assert len(CocoInstances(data, "train2017", PLAIN)[0][1]["boxes"]) == 3


def test_ids_as_text_and_sizes_as_floats(tmp_path):
    data = small_set(tmp_path, [{"image_id": "a"}])
    change(tmp_path, lambda contents: contents["images"][0].update(id="a", width=40.0), "train2017")
    assert CocoInstances(data, "train2017")[0][1]["image_id"] == "a"


@pytest.mark.parametrize("size", [(20, 40), (40, 20)])
def test_exif_rotation_follows_annotations(tmp_path, size):
    """The annotations' width and height say whether they were made for the upright image or the stored one."""
    data = small_set(tmp_path, [{"bbox": [2, 2, 9, 9], "segmentation": [[2, 2, 11, 2, 11, 11, 2, 11]]}])
    change(tmp_path, lambda contents: contents["images"][0].update(width=size[0], height=size[1]), "train2017")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "train2017" / "1.png", exif=exif)
    image, target = CocoInstances(data, "train2017", train_transform(CocoAugmentConfig(short_sides=(20,), hflip=0)))[0]
    assert tuple(image.shape[1:]) == tuple(target["masks"].shape[1:]) == size[::-1]


def test_errors_broken_images(scenes):
    def widen(contents):
        contents["images"][0]["width"] = 65
        for one in contents["annotations"]:
            if one["image_id"] == contents["images"][0]["id"]:
                one["segmentation"]["size"] = [64, 65]

    change(scenes, widen)
    held_out = CocoInstances(CocoDataConfig(root=str(scenes)), "val2017")
    with pytest.raises(BrokenSampleError, match=r"000001.jpg: 64 x 64 pixels, but the annotations are for 65 x 64"):
        held_out[0]
    (scenes / "val2017" / "000002.jpg").write_bytes(b"broken")
    with pytest.raises(BrokenSampleError, match=r"000002\.jpg"):
        held_out[1]
    (scenes / "val2017" / "000002.jpg").unlink()
    with pytest.raises(BrokenSampleError, match=r"000002\.jpg: no such file"):
        held_out[1]
    (scenes / "val2017" / "000002.jpg").symlink_to("nowhere.jpg")
    with pytest.raises(BrokenSampleError, match=r"000002\.jpg: a link to nowhere.jpg, which does not exist"):
        held_out[1]


def test_augment_boxes_follow_masks(scenes):
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


def test_augment_antialias():
    """Half the size without a filter: the mean of two pixels, and the filter reaches further."""
    image = tv_tensors.Image(torch.tensor([0, 0, 0, 240, 0, 0, 0, 0], dtype=torch.uint8).expand(3, 8, 8))
    boxes = tv_tensors.BoundingBoxes([[0.0, 0, 8, 8]], format="XYXY", canvas_size=(8, 8))
    rows = {}
    for antialias in (False, True):
        transform = train_transform(CocoAugmentConfig(short_sides=(4,), long_side=4, hflip=0, antialias=antialias))
        scaled, _ = transform(image, {"boxes": boxes, "labels": torch.ones(1, dtype=torch.int64)})
        rows[antialias] = (255 * scaled[0, 0]).round().int().tolist()
    assert rows[False] == [0, 120, 0, 0]
    assert rows[True] != rows[False]


def test_augment_long_side_before_crop(monkeypatch):
    """The long side is limited in the scaling before a crop too: 20 x 200 becomes 10 x 100, not 60 x 600."""
    seen = []
    make_params = RandomSizeCrop.make_params

    def record(self, flat_inputs):
        seen.append(tuple(flat_inputs[0].shape[1:]))
        return make_params(self, flat_inputs)

    monkeypatch.setattr(RandomSizeCrop, "make_params", record)
    augment = CocoAugmentConfig(short_sides=(60,), long_side=100, crop_short_sides=(60,), crop_sides=(5, 8))
    transform = train_transform(augment)
    torch.manual_seed(0)
    for _ in range(8):
        boxes = tv_tensors.BoundingBoxes([[2.0, 2, 190, 18]], format="XYXY", canvas_size=(20, 200))
        target = {"boxes": boxes, "labels": torch.ones(1, dtype=torch.int64)}
        transform(tv_tensors.Image(torch.zeros(3, 20, 200, dtype=torch.uint8)), target)
    assert set(seen) == {(10, 100)}


def test_random_size_crop_sides():
    crop = RandomSizeCrop((20, 30))
    image = tv_tensors.Image(torch.zeros(3, 25, 90))
    shapes = {tuple(crop(image).shape[1:]) for _ in range(50)}
    assert {height for height, _ in shapes} <= set(range(20, 26))
    assert {width for _, width in shapes} <= set(range(20, 31))
    assert len(shapes) > 10

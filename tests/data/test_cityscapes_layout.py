"""Cityscapes' layout, on a tiny tree of the same form."""

import numpy as np
import pytest
import torch
from PIL import Image

from ppma.data.cityscapes import CLASSES, LAYOUT
from ppma.data.errors import BrokenSampleError
from ppma.data.label_maps import IGNORED
from ppma.data.segmentation import SegmentationDataConfig, SegmentationImages, class_names

SIZE = (32, 16)


def write_image(root, split, city, number, *, labels=None, kind="labelTrainIds", size=SIZE):
    """One image of noise and its label map; without labels, every class once and the rest ignored."""
    stem = f"{city}_{number:06d}_000019"
    for folder in ("leftImg8bit", "gtFine"):
        (root / folder / split / city).mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(number)
    pixels = generator.integers(0, 256, (SIZE[1], SIZE[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(root / "leftImg8bit" / split / city / f"{stem}_leftImg8bit.png")
    if labels is None:
        labels = np.full(size[::-1], 255, np.uint8)
        labels[0, :19] = np.arange(19)
    path = root / "gtFine" / split / city / f"{stem}_gtFine_{kind}.png"
    Image.fromarray(labels).save(path)
    return path


@pytest.fixture
def root(tmp_path):
    for city, count in (("aachen", 2), ("bochum", 1)):
        for number in range(count):
            write_image(tmp_path, "train", city, number)
    write_image(tmp_path, "val", "lindau", 0)
    return tmp_path


def data(root, **changes):
    return SegmentationDataConfig(root=str(root), name="cityscapes", **changes)


@pytest.mark.filterwarnings("error")
def test_samples(root):
    """No shift of labels, 255 ignored, all cities; the convention needs no setting."""
    train = SegmentationImages(data(root), data(root).split("train"))
    assert [path.name for path, _ in train.pairs] == [
        "aachen_000000_000019_leftImg8bit.png",
        "aachen_000001_000019_leftImg8bit.png",
        "bochum_000000_000019_leftImg8bit.png",
    ]
    assert train.classes == CLASSES
    assert train.maps == root / "gtFine" / "train"
    image, labels = train[2]
    assert (image.shape, labels.shape) == ((3, 16, 32), (16, 32))
    assert labels[0, :20].tolist() == [*range(19), IGNORED]
    assert (labels[1:] == IGNORED).all()
    assert len(SegmentationImages(data(root), data(root).split("val"))) == 1


def test_classes_and_palette():
    assert len(CLASSES) == len(LAYOUT.palette) == len(set(LAYOUT.palette)) == 19
    assert (CLASSES[0], LAYOUT.palette[0]) == ("road", (128, 64, 128))
    assert (CLASSES[-1], LAYOUT.palette[-1]) == ("bicycle", (119, 11, 32))
    assert class_names(data("nowhere")) == CLASSES
    with pytest.raises(ValueError, match=r"data.classes: expected 19 names, as Cityscapes has, got 2"):
        class_names(data("nowhere", classes=("a", "b")))


def test_label_map_missing(root):
    (root / "gtFine" / "train" / "aachen" / "aachen_000001_000019_gtFine_labelTrainIds.png").unlink()
    expected = r"skipped 1 images without a label map, such as .*aachen_000001_000019_gtFine_labelTrainIds\.png"
    with pytest.warns(UserWarning, match=expected):
        assert len(SegmentationImages(data(root), "train")) == 2


def test_label_map_missing_everywhere(root):
    for path in (root / "gtFine" / "val").glob("*/*.png"):
        path.unlink()
    with pytest.raises(
        ValueError, match=r"expected images with label maps in .*leftImg8bit/val and .*labelTrainIds.png"
    ):
        SegmentationImages(data(root), "val")
    with pytest.raises(ValueError, match=r"data.root: expected a folder .*leftImg8bit/test, found none"):
        SegmentationImages(data(root), "test")


def test_label_map_of_label_ids(root, tmp_path):
    """Only the downloaded labelIds files, or their values under the other name: the message names labelTrainIds."""
    (path,) = (root / "gtFine" / "val").glob("*/*.png")
    path.rename(path.with_name(path.name.replace("labelTrainIds", "labelIds")))
    with pytest.raises(
        ValueError, match=r"expected .*_gtFine_labelTrainIds.png, found only .*_gtFine_labelIds.png: "
    ) as e:
        SegmentationImages(data(root), "val")
    assert "\n" not in str(e.value)
    labels = np.full(SIZE[::-1], 7, np.uint8)
    labels[2, 3] = 33
    write_image(root, "val", "lindau", 0, labels=labels)
    expected = r"label 33 out of range, expected 0 to 18 for 19 classes, 255 ignored .*; labels 19 to 33 are those of "
    with pytest.raises(ValueError, match=f"{expected}labelIds files, not of labelTrainIds: ") as e:
        SegmentationImages(data(root), "val")
    assert "\n" not in str(e.value)


def test_label_map_wrong_size(root):
    held_out = SegmentationImages(data(root), "val")
    labels = np.zeros((16, 30), np.uint8)
    write_image(root, "val", "lindau", 0, labels=labels)
    expected = "lindau_000000_000019_gtFine_labelTrainIds.png: 30 x 16 labels, but the image has 32 x 16 pixels"
    with pytest.raises(ValueError, match=expected):
        SegmentationImages(data(root), "val")
    with pytest.raises(BrokenSampleError, match=expected):
        held_out[0]


def test_other_files_are_not_images(root):
    """Cityscapes' folders also hold colour maps, polygons and other cameras."""
    city = root / "leftImg8bit" / "val" / "lindau"
    Image.new("RGB", SIZE).save(city / "lindau_000000_000019_rightImg8bit.png")
    (city / "license.txt").write_text("x")
    (root / "leftImg8bit" / "val" / "README").write_text("x")
    held_out = SegmentationImages(data(root), "val")
    assert len(held_out) == 1
    assert torch.equal(held_out[0][1][0, :19], torch.arange(19))

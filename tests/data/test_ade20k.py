"""Images with label maps in ADE20K's layout, and what is said about those that are not right."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from ppma.config import ConfigError
from ppma.data.ade20k import IGNORED, Ade20kDataConfig, Ade20kImages, class_names
from ppma.data.ade20k_transforms import Ade20kAugmentConfig, VariedCrop, train_transform
from ppma.data.scenes import SEMANTIC_CLASSES, compose
from ppma.data.scenes_files import write_scenes
from ppma.engine.task import BrokenSampleError


@pytest.fixture
def scenes(tmp_path):
    write_scenes(tmp_path / "scenes", train=4, val=2, size=64)
    return tmp_path / "scenes"


def write_map(scenes, values):
    Image.fromarray(np.asarray(values)).save(scenes / "annotations" / "validation" / "000001.png")


def test_samples_are_the_scenes(scenes):
    held_out = Ade20kImages(Ade20kDataConfig(root=str(scenes)), "validation")
    assert held_out.classes == SEMANTIC_CLASSES
    assert len(held_out) == 2
    image, labels = held_out[1]
    assert (image.shape, image.dtype, labels.dtype) == ((3, 64, 64), torch.float32, torch.int64)
    assert np.array_equal(labels, compose("val", 1, size=64).semantic)


def test_zero_is_no_label(scenes):
    values = np.ones((64, 64), np.uint8)
    values[0, 0], values[0, 1], values[0, 2] = 0, 255, 11
    write_map(scenes, values)
    labels = Ade20kImages(Ade20kDataConfig(root=str(scenes)), "validation")[0][1]
    assert labels[0, :4].tolist() == [IGNORED, IGNORED, 10, 0]


def test_broken_label_maps_are_named(scenes):
    held_out = Ade20kImages(Ade20kDataConfig(root=str(scenes)), "validation")
    write_map(scenes, np.full((64, 64), 12, np.uint8))
    with pytest.raises(BrokenSampleError, match=r"000001.png: label 12 out of range, expected 0 to 11 or 255"):
        held_out[0]
    write_map(scenes, np.ones((60, 64), np.uint8))
    with pytest.raises(BrokenSampleError, match=r"000001.png: 64 x 60 labels, but the image has 64 x 64 pixels"):
        held_out[0]
    write_map(scenes, np.ones((64, 64, 3), np.uint8))
    with pytest.raises(BrokenSampleError, match="expected one label for each pixel, found 3 channels"):
        held_out[0]
    (scenes / "annotations" / "validation" / "000001.png").write_bytes(b"broken")
    with pytest.raises(BrokenSampleError, match=r"000001\.png"):
        held_out[0]


def test_images_without_a_label_map_are_counted_and_left_out(scenes):
    data = Ade20kDataConfig(root=str(scenes))
    (scenes / "annotations" / "training" / "000002.png").unlink()
    with pytest.warns(UserWarning, match="left out: 1 images without a label map"):
        train = Ade20kImages(data, "training")
    assert len(train) == 3
    for path in (scenes / "annotations" / "training").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="expected images with label maps"):
        Ade20kImages(data, "training")
    with pytest.raises(ValueError, match=r"data.root: expected a folder .*images/testing, found none"):
        Ade20kImages(data, "testing")


def test_classes_come_from_the_configuration_or_the_folder(scenes):
    assert class_names(Ade20kDataConfig(root=str(scenes), classes=("a", "b"))) == ("a", "b")
    (scenes / "classes.txt").unlink()
    with pytest.raises(ValueError, match=r"data.classes: expected names, or classes.txt or objectInfo150.txt in"):
        class_names(Ade20kDataConfig(root=str(scenes)))
    table = (
        "Idx\tRatio\tTrain\tVal\tStuff\tName\n1\t0.15\t11664\t1172\t1\twall\n2\t0.1\t6046\t612\t1\tbuilding, edifice\n"
    )
    (scenes / "objectInfo150.txt").write_text(table)
    assert class_names(Ade20kDataConfig(root=str(scenes))) == ("wall", "building, edifice")
    with pytest.raises(ConfigError, match="classes: expected 2 to 254 names"):
        Ade20kDataConfig(root="", classes=("alone",))


def test_images_are_scaled_to_fit_both_sides():
    data = Ade20kDataConfig(root="", short_side=512, long_side=2048)
    assert data.scaled(300, 400) == (512, 683)
    assert data.scaled(100, 1000) == (205, 2048)
    assert data.scaled(300, 400, 0.5) == (256, 341)


def test_training_images_are_squares_with_their_labels(scenes):
    data = Ade20kDataConfig(root=str(scenes), short_side=64, long_side=64)
    augment = Ade20kAugmentConfig(ratio=(0.5, 2.0), crop=80)
    train = Ade20kImages(data, "training", train_transform(data, augment))
    torch.manual_seed(0)
    padded = 0
    for index in [0, 1, 2, 3] * 4:
        image, labels = train[index]
        assert (image.shape, image.dtype) == ((3, 80, 80), torch.float32)
        assert (labels.shape, labels.dtype) == ((80, 80), torch.int64)
        assert set(labels.unique().tolist()) <= {*range(11), IGNORED}
        outside = labels == IGNORED  # every pixel of a scene has a label
        padded += int(outside.any())
        assert not image[:, outside].any()
    assert 0 < padded < 16


def test_labels_move_with_their_pixels(scenes):
    """Every pixel is painted with its label; the augmentation must keep that."""
    data = Ade20kDataConfig(root=str(scenes), short_side=64, long_side=64, mean=(0, 0, 0), std=(1, 1, 1))
    transform = train_transform(data, Ade20kAugmentConfig(ratio=(1, 1), crop=40, hflip=0.5, photometric=False))
    labels = torch.from_numpy(compose("train", 0, size=64).semantic).long()
    painted = (labels * 20).to(torch.uint8).expand(3, 64, 64).contiguous()
    for seed in range(8):
        torch.manual_seed(seed)
        image, moved = transform(tv_tensors.Image(painted), tv_tensors.Mask(labels))
        assert torch.equal((image[0] * 255 / 20).round().long(), moved)


def test_crops_that_one_class_fills_are_drawn_again():
    labels = torch.zeros(40, 400, dtype=torch.int64)
    labels[:, 380:] = 1  # seldom in a crop
    crop = VariedCrop(40, class_share=0.75)
    found = []
    for seed in range(40):
        torch.manual_seed(seed)
        found.append(len(crop(tv_tensors.Mask(labels)).unique()) == 2)
    once = 1 - 340 / 361
    assert np.mean(found) > 3 * once


def test_mistakes_in_the_configuration_are_named():
    with pytest.raises(ConfigError, match="short_side: expected 1 to long_side"):
        Ade20kDataConfig(root="", short_side=100, long_side=50)
    with pytest.raises(ConfigError, match="class_share"):
        Ade20kAugmentConfig(class_share=0)
    with pytest.raises(ConfigError, match="ratio"):
        Ade20kAugmentConfig(ratio=(2, 1))

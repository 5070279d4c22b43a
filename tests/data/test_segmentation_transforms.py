"""Augmentation of images with label maps."""

import numpy as np
import pytest
import torch
from torchvision import tv_tensors

from ppma.config import ConfigError
from ppma.data.label_maps import IGNORED
from ppma.data.scenes import compose
from ppma.data.scenes_files import write_scenes
from ppma.data.segmentation import SegmentationDataConfig, SegmentationImages
from ppma.data.segmentation_transforms import RandomScale, SegmentationAugmentConfig, VariedCrop, train_transform


@pytest.fixture
def scenes(tmp_path):
    write_scenes(tmp_path / "scenes", train=4, val=1, size=64)
    return tmp_path / "scenes"


def test_train_transform_shapes(scenes):
    data = SegmentationDataConfig(str(scenes), labels="ade20k", short_side=64, long_side=64)
    augment = SegmentationAugmentConfig(ratio=(0.5, 2.0), crop=80)
    train = SegmentationImages(data, "training", train_transform(data, augment))
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


def test_train_transform_labels_follow_pixels():
    """Each pixel is painted with its label, before and after."""
    data = SegmentationDataConfig("", short_side=64, long_side=64, mean=(0, 0, 0), std=(1, 1, 1))
    transform = train_transform(data, SegmentationAugmentConfig(ratio=(1, 1), crop=40, hflip=0.5, photometric=False))
    labels = torch.from_numpy(compose("train", 0, size=64).semantic).long()
    painted = (labels * 20).to(torch.uint8).expand(3, 64, 64).contiguous()
    for seed in range(8):
        torch.manual_seed(seed)
        image, moved = transform(tv_tensors.Image(painted), tv_tensors.Mask(labels))
        assert torch.equal((image[0] * 255 / 20).round().long(), moved)


def test_varied_crop_class_share():
    labels = torch.zeros(40, 400, dtype=torch.int64)
    labels[:, 380:] = 1  # seldom in a crop
    crop = VariedCrop(40, class_share=0.75)
    found = []
    for seed in range(40):
        torch.manual_seed(seed)
        found.append(len(crop(tv_tensors.Mask(labels)).unique()) == 2)
    once = 1 - 340 / 361
    assert np.mean(found) > 3 * once


@pytest.mark.parametrize("antialias", [True, False])
def test_random_scale_antialias(antialias):
    """Reduced by 4, a bright line in every fourth column is seen through a filter only."""
    image = torch.zeros(3, 64, 64, dtype=torch.uint8)
    image[:, :, ::4] = 255
    data = SegmentationDataConfig("", short_side=16, long_side=16, antialias=antialias)
    reduced = RandomScale(data, (1.0, 1.0))(tv_tensors.Image(image))
    assert reduced.shape == (3, 16, 16)
    assert bool(reduced.any()) == antialias


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"class_share": 0}, r"class_share: expected a number in \(0, 1\]"),
        ({"ratio": (2, 1)}, "ratio: expected two ascending numbers > 0"),
        ({"crop": 10**6}, "crop: expected 1 to 16384"),
        ({"hflip": 2}, "hflip: expected a probability"),
    ],
)
def test_augment_config_errors(values, message):
    with pytest.raises(ConfigError, match=message):
        SegmentationAugmentConfig(**values)

"""Scaling of images and pasting of masks as MMDetection does it."""

import pytest
import torch

from ppma.tasks.detection import DetectorConfig
from ppma.tasks.detection.scaling import ImageScaling, paste_masks, resize_8bit

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize(
    ("size", "scaled"),
    [((427, 640), (800, 1199)), ((640, 427), (1199, 800)), ((480, 640), (800, 1067)), ((300, 900), (444, 1333))],
)
def test_resize_rounds_sizes(size, scaled):
    """1066.67 becomes 1067, where torchvision has 1066."""
    assert tuple(resize_8bit(torch.rand(3, *size), 800, 1333).shape[1:]) == scaled
    assert resize_8bit(torch.rand(3, 1, 5000), 800, 1333).shape == (3, 1, 1333)


def test_resize_bilinear_in_8_bits():
    row = torch.tensor([0.0, 100, 37, 255]) / 255
    image = row.expand(3, 4, 4)
    # Twice as long: quarters of neighbouring pixels, rounded half up.
    expected = [0, 25, 75, 84, 53, 92, 201, 255]
    found = 255 * resize_8bit(image, 8, 8)
    torch.testing.assert_close(found, torch.tensor(expected).float().expand(3, 8, 8))


@pytest.mark.parametrize(("size", "scaled"), [((48, 64), (80, 107)), ((120, 90), (64, 48)), ((60, 80), (30, 40))])
def test_resize_matches_opencv(size, scaled):
    """OpenCV rounds weights and sums to fixed-point numbers: at most one grey level of difference."""
    cv2 = pytest.importorskip("cv2")
    image = torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = torch.from_numpy(cv2.resize(image.numpy(), scaled[::-1], interpolation=cv2.INTER_LINEAR))
    found = 255 * resize_8bit(image.permute(2, 0, 1) / 255, min(scaled), max(scaled))
    assert (found.permute(1, 2, 0).round() - expected).abs().max() <= 1


def test_scaling_modes_evaluation_and_training():
    image = torch.rand(3, 37, 51)
    for resize, size in (("torchvision", (63, 86)), ("mmdetection", (63, 87))):
        detector = DetectorConfig(short_side=63, long_side=96, resize=resize)
        scaling = ImageScaling(detector, MEAN, STD)
        assert scaling.eval()([image])[0].image_sizes == [size]
        images, _ = scaling.train()([image])
        assert images.image_sizes == [(37, 51)]
        expected = (image - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
        torch.testing.assert_close(images.tensors[0, :, :37, :51], expected)


def test_paste_samples_pixel_centres():
    mask = torch.zeros(1, 1, 2, 2)
    mask[..., 0, 0] = 1
    pasted = paste_masks(mask, torch.tensor([[2.0, 2, 10, 6]]), (8, 12))[0, 0]
    # In x a pixel is 1/4 cell of the mask, in y 1/2: shares of the first cell along each axis.
    columns = [0, 0, 0.625, 0.875, 0.875, 0.625, 0.375, 0.125, 0, 0, 0, 0]
    rows = [0, 0, 0.75, 0.75, 0.25, 0, 0, 0]
    expected = torch.tensor(rows)[:, None] * torch.tensor(columns)
    inside = (slice(2, 6), slice(2, 10))
    torch.testing.assert_close(pasted[inside], expected[inside])
    outside = pasted.clone()
    outside[inside] = 0
    assert outside.max() < 0.5  # interpolated towards 0 around the box
    assert pasted[:, 11].max() == pasted[0].max() == 0


def test_paste_boxes_outside_and_without_area():
    masks = torch.ones(3, 1, 28, 28)
    boxes = torch.tensor([[-4.0, -4, 4, 4], [12.0, 0, 12, 8], [3.0, 3, 3, 3]])
    pasted = paste_masks(masks, boxes, (8, 12))
    assert pasted.shape == (3, 1, 8, 12)
    assert torch.isfinite(pasted).all()
    assert (pasted[0, 0] >= 0.5).nonzero().max() == 3
    assert paste_masks(masks[:0], boxes[:0], (8, 12)).shape == (0, 1, 8, 12)

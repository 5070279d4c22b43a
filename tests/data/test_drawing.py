"""Drawings of labelled samples."""

import torch
from PIL import Image

from ppma.data.drawing import CELL, colour_of, contact_sheet, draw_instances, draw_labels, to_pixels
from ppma.data.label_maps import IGNORED

GREY = torch.full((3, 64, 32), 100, dtype=torch.uint8)


def test_to_pixels_inverts_normalisation():
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    pixels = torch.randint(256, (3, 4, 5), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    normalised = (pixels / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    assert torch.equal(to_pixels(normalised, mean, std), pixels)


def test_draw_labels_colours():
    labels = torch.zeros(64, 32, dtype=torch.int64)
    labels[32:, :16], labels[32:, 16:] = 1, IGNORED
    picture = draw_labels(GREY, labels, ("a", "b"), [(200, 0, 0), (0, 200, 100)])
    assert picture.size == (CELL // 2, CELL)
    assert [picture.getpixel(spot) for spot in ((64, 100), (32, 200), (96, 200))] == [
        (150, 50, 50),
        (50, 150, 100),
        (0, 0, 0),
    ]


def test_draw_instances_mask_and_box():
    masks = torch.zeros(1, 64, 32, dtype=torch.uint8)
    masks[0, 20:40, 10:20] = 1
    picture = draw_instances(GREY, torch.tensor([[10.0, 20.0, 20.0, 40.0]]), masks, ["cat"])
    red, green, blue = colour_of(0)
    assert picture.getpixel((60, 80)) == (red, green, blue)  # the upper edge of the box
    tinted = picture.getpixel((60, 120))
    assert all(abs(found - (100 + part) / 2) <= 1 for found, part in zip(tinted, (red, green, blue), strict=True))
    assert picture.getpixel((20, 120)) == (100, 100, 100)


def test_draw_instances_none():
    assert draw_instances(GREY, torch.zeros(0, 4), torch.zeros(0, 64, 32), []).getpixel((0, 0)) == (100, 100, 100)


def test_contact_sheet_grid():
    panels = [(Image.new("RGB", (CELL, CELL), (number, 0, 0)), "long caption " * 20) for number in range(5)]
    sheet = contact_sheet(panels)
    assert sheet.size == (3 * (CELL + 6) + 6, 2 * (CELL + 22) + 6)
    assert sheet.getpixel((6 + 262, 6 + 278)) == (4, 0, 0)  # the fifth: second row, second column
    assert sheet.getpixel((6 + 2 * 262 + 100, 6 + 278 + 100)) == (255, 255, 255)

"""What is drawn on an image is where it should be, in the colour of its instance or class."""

import numpy as np
import torch
from PIL import Image

from ppma.data.decoding import decode_labels
from ppma.data.drawing import colour_of
from ppma.tasks.dense.overlay import draw_classes, draw_instances, enlargement, label_image

GREY = Image.new("RGB", (600, 560), (100, 100, 100))
COLOURS = [colour_of(label) for label in range(9)]


def square(left, top, side):
    mask = torch.zeros(560, 600, dtype=torch.bool)
    mask[top : top + side, left : left + side] = True
    return mask


def drawn_squares(*squares):
    """Instances that are squares (left, top, side), drawn on grey."""
    boxes = torch.tensor([[left, top, left + side - 1, top + side - 1] for left, top, side in squares]).float()
    masks = torch.stack([square(*one) for one in squares])
    return np.asarray(draw_instances(GREY, boxes, masks, ["cat"] * len(squares), [0.5] * len(squares)))


def test_instances_outline_and_colour_each():
    drawn = drawn_squares((50, 100, 100), (300, 100, 100))
    for left, colour in ((50, COLOURS[0]), (300, COLOURS[1])):
        assert tuple(drawn[150, left]) == colour  # the outline
        assert tuple(drawn[90, left + 2]) == colour  # the caption above
        inside = drawn[150, left + 50]
        assert tuple(inside) not in ((100, 100, 100), colour)  # the image shows through
        assert np.abs(inside - np.array(colour)).sum() < np.abs(100 - np.array(colour)).sum()
    assert tuple(drawn[300, 300]) == (100, 100, 100)


def test_instances_captions_spare_small_objects():
    """A small instance where the large one's caption would usually be stays visible."""
    drawn = drawn_squares((50, 110, 200), (54, 96, 8))
    assert not (drawn[96:104, 54:62] == COLOURS[0]).all(2).any()
    assert (drawn[96:104, 54] == COLOURS[1]).all()  # its outline
    assert (drawn == COLOURS[0]).all(2).sum() > 12 * 30  # a caption's ground, elsewhere


def test_instances_captions_inside_the_picture():
    drawn = drawn_squares((0, 0, 30), (590, 550, 10))
    for colour in COLOURS[:2]:
        assert (drawn == colour).all(2).sum() > 12 * 30  # a caption's ground


def test_instances_none():
    none = draw_instances(GREY, torch.zeros(0, 4), torch.zeros(0, 560, 600, dtype=torch.bool), [], [])
    assert none.tobytes() == GREY.tobytes()


def test_instances_empty_mask_and_box_outside():
    boxes, masks = torch.tensor([[-5.0, -5.0, 700.0, 3.0]]), torch.zeros(1, 560, 600, dtype=torch.bool)
    assert draw_instances(GREY, boxes, masks, ["cat"], [0.5]).size == GREY.size


def test_classes_enlarged_with_legend():
    small = GREY.resize((64, 32))
    factor = enlargement(small)
    labels = torch.zeros(32, 64, dtype=torch.int64)
    labels[:, 32:] = 1
    drawn = draw_classes(small, labels, ("left", "right", "nowhere"), COLOURS[:3])
    assert factor == 8
    assert drawn.height == 32 * factor
    assert drawn.width > 64 * factor
    assert drawn.getpixel((10, 64)) != drawn.getpixel((400, 64))
    legend = {tuple(pixel) for pixel in np.asarray(drawn)[:, 64 * factor :].reshape(-1, 3)}
    assert {COLOURS[0], COLOURS[1]} <= legend
    assert COLOURS[2] not in legend


def test_classes_background_not_painted():
    labels = torch.zeros(560, 600, dtype=torch.int64)
    labels[100:200, 100:200] = 1
    drawn = draw_classes(GREY, labels, ("Background", "cat"), COLOURS[:2])
    assert drawn.getpixel((300, 300)) == (100, 100, 100)
    assert drawn.getpixel((150, 150)) != (100, 100, 100)
    assert drawn.getpixel((100, 150)) == COLOURS[1]  # the outline
    assert COLOURS[0] not in {tuple(pixel) for pixel in np.asarray(drawn).reshape(-1, 3)}


def test_label_image_indices_and_palette():
    labels = torch.tensor([[0, 3], [8, 1]])
    image = label_image(labels, COLOURS)
    assert np.asarray(image).tolist() == labels.tolist()
    assert image.convert("RGB").getpixel((1, 0)) == COLOURS[3]


def test_label_image_many_classes(tmp_path):
    labels = torch.tensor([[0, 300]])
    label_image(labels, [colour_of(index) for index in range(301)]).save(tmp_path / "labels.png")
    assert decode_labels(tmp_path / "labels.png").tolist() == labels.tolist()

"""What is drawn on an image is where it should be, in the colour of its class."""

import torch
from PIL import Image

from ppma.tasks.dense.overlay import colour_of, draw_classes, draw_instances, enlargement

GREY = Image.new("RGB", (300, 280), (100, 100, 100))


def test_instances_have_box_mask_and_a_text_on_its_own_ground():
    boxes = torch.tensor([[50.0, 100.0, 150.0, 200.0], [200.0, 5.0, 260.0, 60.0]])
    masks = torch.zeros(2, 280, 300, dtype=torch.bool)
    masks[0, 120:180, 70:130] = True
    drawn = draw_instances(GREY, boxes, masks, [2, 0], ["two", "zero"])
    assert drawn.size == GREY.size
    colours = [colour_of(label) for label in range(3)]
    assert drawn.getpixel((100, 100)) == colours[2]
    assert drawn.getpixel((230, 60)) == colours[0]
    assert drawn.getpixel((51, 87)) == colours[2]  # above the first box
    assert drawn.getpixel((201, 8)) == colours[0]  # no room above the second
    assert drawn.getpixel((100, 150)) not in ((100, 100, 100), colours[2])  # the mask lets the image through
    assert drawn.getpixel((20, 250)) == (100, 100, 100)


def test_an_image_without_instances_stays_as_it_is():
    none = draw_instances(GREY, torch.zeros(0, 4), torch.zeros(0, 280, 300, dtype=torch.bool), [], [])
    assert none.tobytes() == GREY.tobytes()


def test_small_images_are_enlarged_and_classes_listed():
    small = GREY.resize((64, 32))
    factor = enlargement(small)
    labels = torch.zeros(32, 64, dtype=torch.int64)
    labels[:, 32:] = 1
    drawn = draw_classes(small, labels, ("left", "right", "nowhere"))
    assert factor == 4
    assert drawn.height == 32 * factor
    assert drawn.width > 64 * factor
    assert drawn.getpixel((10, 64)) != drawn.getpixel((200, 64))
    legend = {drawn.getpixel((64 * factor + 9, row)) for row in range(drawn.height)}
    assert {colour_of(0), colour_of(1)} <= legend
    assert colour_of(2) not in legend

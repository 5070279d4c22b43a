"""MMSegmentation's distortion of colours against a version written out for one pixel."""

import itertools

import pytest
import torch
from torchvision import tv_tensors

from ppma.data import photometric
from ppma.data.photometric import PhotometricDistortion, add_brightness, scale_contrast, scale_saturation, shift_hue


@pytest.fixture(scope="module")
def image():
    """Random colours, all corners of the cube, greys, and pairs of equal channels."""
    colours = torch.randint(0, 256, (3, 40 * 30), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    corners = list(itertools.product((0, 1, 127, 255), repeat=3))
    colours[:, : len(corners)] = torch.tensor(corners, dtype=torch.uint8).T
    return colours.view(3, 40, 30)


def byte(value):
    return int(min(max(value, 0), 255))


def to_hsv(red, green, blue):
    """The fixed-point arithmetic of OpenCV's 8-bit HSV."""
    value, chroma = max(red, green, blue), max(red, green, blue) - min(red, green, blue)
    if chroma == 0:
        return 0, 0, value
    if value == red:
        sector = green - blue
    elif value == green:
        sector = blue - red + 2 * chroma
    else:
        sector = red - green + 4 * chroma
    hue = (sector * round(4096 * 30 / chroma) + 2048) >> 12
    saturation = (chroma * round(4096 * 255 / value) + 2048) >> 12
    return hue + 180 if hue < 0 else hue, saturation, value


def to_rgb(hue, saturation, value):
    sector, rest = divmod(hue, 30)
    low = value * (255 - saturation) // 255
    falling = value * (255 * 30 - saturation * rest) // (255 * 30)
    rising = value * (255 * 30 - saturation * (30 - rest)) // (255 * 30)
    return [
        (value, rising, low),
        (falling, value, low),
        (low, value, rising),
        (low, falling, value),
        (rising, low, value),
        (value, low, falling),
    ][sector]


def brightness_of_pixel(pixel, amount):
    return tuple(byte(value + amount) for value in pixel)


def contrast_of_pixel(pixel, factor):
    return tuple(byte(value * factor) for value in pixel)


def saturation_of_pixel(pixel, factor):
    hue, saturation, value = to_hsv(*pixel)
    return to_rgb(hue, byte(saturation * factor), value)


def hue_of_pixel(pixel, amount):
    hue, saturation, value = to_hsv(*pixel)
    return to_rgb((hue + amount) % 180, saturation, value)


def by_pixel(image, *steps):
    pixels = [tuple(pixel) for pixel in image.flatten(1).T.tolist()]
    for change, amount in steps:
        pixels = [change(pixel, amount) for pixel in pixels]
    return torch.tensor(pixels, dtype=torch.uint8).T.reshape(image.shape)


# Amounts that binary fractions hold exactly, so that float32 and Python's floats agree.
@pytest.mark.parametrize(
    ("change", "written_out", "amount"),
    [
        (add_brightness, brightness_of_pixel, 31.75),
        (add_brightness, brightness_of_pixel, -31.75),
        (scale_contrast, contrast_of_pixel, 0.53125),
        (scale_contrast, contrast_of_pixel, 1.46875),
        (scale_saturation, saturation_of_pixel, 0.53125),
        (scale_saturation, saturation_of_pixel, 1.46875),
        (shift_hue, hue_of_pixel, 17),
        (shift_hue, hue_of_pixel, -18),
    ],
)
def test_change_of_each_pixel(image, change, written_out, amount):
    changed = change(image, amount)
    assert changed.dtype == torch.uint8
    assert torch.equal(changed, by_pixel(image, (written_out, amount)))


def test_known_colours():
    """Red shifted by a third of the hue circle is green; without saturation a colour is its largest channel."""
    red = torch.tensor([255, 0, 0], dtype=torch.uint8).view(3, 1, 1)
    assert shift_hue(red, 60).flatten().tolist() == [0, 255, 0]
    assert scale_saturation(red, 0).flatten().tolist() == [255, 255, 255]


@pytest.mark.parametrize("contrast_first", [True, False])
def test_transform_order(image, contrast_first, monkeypatch):
    """All four changes, in their order; labels are untouched."""
    amounts = iter((-12.5, 1.25, 1.375))  # brightness, saturation, contrast
    coins = iter((contrast_first, True, True, True, True))
    monkeypatch.setattr(photometric, "_uniform", lambda low, high: next(amounts))
    monkeypatch.setattr(photometric, "_coin", lambda: next(coins))
    monkeypatch.setattr(torch, "randint", lambda low, high, size: torch.tensor(-7))
    labels = tv_tensors.Mask(torch.ones(40, 30, dtype=torch.int64))
    changed, kept = PhotometricDistortion()(tv_tensors.Image(image), labels)
    steps = [(brightness_of_pixel, -12.5), (saturation_of_pixel, 1.25), (hue_of_pixel, -7)]
    steps.insert(1 if contrast_first else 3, (contrast_of_pixel, 1.375))
    assert isinstance(changed, tv_tensors.Image)
    assert torch.equal(changed, by_pixel(image, *steps))
    assert torch.equal(kept, labels)


def test_transform_ranges():
    """Over many draws: each change half of the time, contrast in both places, amounts that fill their ranges."""
    torch.manual_seed(0)
    drawn = [PhotometricDistortion().make_params([])["changes"] for _ in range(2000)]
    ranges = {add_brightness: (-32, 32), scale_contrast: (0.5, 1.5), scale_saturation: (0.5, 1.5), shift_hue: (-18, 17)}
    for change, (low, high) in ranges.items():
        amounts = [amount for changes in drawn for name, amount in changes if name is change]
        assert abs(len(amounts) - 1000) < 5 * 500**0.5  # five standard deviations of a binomial
        margin = 0.02 * (high - low)
        assert low <= min(amounts) < low + margin
        assert high - margin < max(amounts) <= high
    whole = [[name for name, _ in changes] for changes in drawn if len(changes) == 4]
    first = sum(names[1] is scale_contrast for names in whole)
    assert all(names[1] is scale_contrast or names[3] is scale_contrast for names in whole)
    assert abs(first - len(whole) / 2) < 5 * (len(whole) / 4) ** 0.5


def test_transform_seed_repeats(image):
    def run():
        torch.manual_seed(3)
        return PhotometricDistortion()(tv_tensors.Image(image))

    assert torch.equal(run(), run())

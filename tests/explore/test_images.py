"""Sample images, and the limits for those that users bring."""

import pytest
from PIL import Image

from ppma.explore import images


def test_samples_size_and_credits():
    files = list(images.SAMPLES.iterdir())
    assert sum(path.stat().st_size for path in files) < 300_000
    credits = (images.SAMPLES / "README.txt").read_text()
    for name in images.sample_names():
        assert images.find_image(name).mode == "RGB"
        assert images.sample_path(name).name in credits


def test_find_image_file(tmp_path):
    Image.new("L", (20, 30), 7).save(tmp_path / "grey.png")
    image = images.find_image(tmp_path / "grey.png")
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (20, 30), (7, 7, 7))


def test_read_image_exif_and_16_bit(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("I;16", (20, 30), 65535 // 3).save(tmp_path / "deep.png", exif=exif)
    image = images.read_image(tmp_path / "deep.png")
    assert (image.size, image.getpixel((0, 0))) == ((30, 20), (85, 85, 85))


def test_read_image_oversized_or_broken(tmp_path, monkeypatch):
    good = tmp_path / "good.png"
    Image.effect_noise((64, 64), 50).save(good)
    with pytest.raises(ValueError, match="found none"):
        images.read_image(tmp_path / "missing.png")
    (tmp_path / "text.png").write_text("not a picture")
    with pytest.raises(ValueError, match=r"text\.png cannot be read"):
        images.read_image(tmp_path / "text.png")
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged or cut short"):
        images.read_image(tmp_path / "cut.png")
    Image.new("1", (2000, 20)).save(tmp_path / "long.png")
    with pytest.raises(ValueError, match=r"ratio of at most 10 to 1, long\.png has 2000 x 20"):
        images.read_image(tmp_path / "long.png")
    monkeypatch.setattr(images, "MAX_PIXELS", 1000)
    with pytest.raises(ValueError, match=r"at most 0\.001 megapixels, good\.png has 64 x 64"):
        images.read_image(good)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Pillow's own limit
    with pytest.raises(ValueError, match=r"good\.png cannot be read"):
        images.read_image(good)
    monkeypatch.setattr(images, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match=r"at most 0\.001 MB, good\.png has"):
        images.read_image(good)

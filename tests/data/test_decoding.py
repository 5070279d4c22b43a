"""Decoding of image files: modes, orientation, messages for unreadable files."""

import builtins
import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ppma.data.decoding import decode, image_files, image_size, read_images
from ppma.data.errors import BrokenSampleError

RAMP = np.linspace(0, 1, 256).reshape(16, 16)  # every grey value of 8 bits once


def saved(path, image, **options):
    image.save(path, **options)
    return path


def grey(image):
    values = np.asarray(image)
    assert values.shape[-1] == 3
    assert (values == values[..., :1]).all()
    return values[..., 0]


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_decode_16_bit(tmp_path, suffix):
    values = np.rint(RAMP * 65535).astype(np.uint16)
    path = saved(tmp_path / f"deep.{suffix}", Image.fromarray(values))
    assert np.array_equal(grey(decode(path, "deep")), np.rint(RAMP * 255))


def test_decode_32_bit_integers(tmp_path):
    values = np.rint(RAMP * 65535).astype(np.int32)
    path = saved(tmp_path / "wide.tif", Image.fromarray(values))
    with Image.open(path) as opened:
        assert opened.mode == "I"
    assert np.array_equal(grey(decode(path, "wide")), np.rint(RAMP * 255))
    saved(path, Image.fromarray(values * 2))
    with pytest.raises(BrokenSampleError, match="wide: expected I pixels from 0 to 65535, found 0 to 131070"):
        decode(path, "wide")


def test_decode_floats(tmp_path):
    path = saved(tmp_path / "float.tif", Image.fromarray(RAMP.astype(np.float32)))
    assert np.array_equal(grey(decode(path, "float")), np.rint(RAMP * 255))
    for wrong, found in (
        (RAMP * 255, "0 to 255"),
        (RAMP - 1, "-1 to 0"),
        (np.where(RAMP == 1, np.nan, 0), "nan to nan"),
    ):
        saved(path, Image.fromarray(wrong.astype(np.float32)))
        with pytest.raises(BrokenSampleError, match=f"float: expected F pixels from 0 to 1, found {found}"):
            decode(path, "float")


@pytest.mark.parametrize(
    ("mode", "colour", "suffix", "expected"),
    [
        ("1", 1, "png", (255, 255, 255)),
        ("L", 7, "png", (7, 7, 7)),
        ("LA", (7, 255), "png", (7, 7, 7)),
        ("LA", (7, 0), "png", (255, 255, 255)),  # transparent: the white ground
        ("RGBA", (10, 20, 30, 255), "png", (10, 20, 30)),
        ("RGBA", (0, 0, 0, 0), "png", (255, 255, 255)),
        ("RGBA", (0, 0, 0, 51), "png", (204, 204, 204)),
        ("CMYK", (0, 255, 255, 0), "tif", (255, 0, 0)),
        ("RGB", (10, 20, 30), "bmp", (10, 20, 30)),
    ],
)
def test_decode_modes(tmp_path, mode, colour, suffix, expected):
    path = saved(tmp_path / f"image.{suffix}", Image.new(mode, (3, 2), colour))
    image = decode(path, "image")
    assert (image.mode, image.size, image.getpixel((1, 1))) == ("RGB", (3, 2), expected)


@pytest.mark.parametrize("transparency", [1, bytes([255, 0, 255])])
def test_decode_palette_with_transparency(tmp_path, transparency, recwarn):
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8))
    image.putpalette([9, 8, 7, 1, 2, 3, 40, 50, 60])
    path = saved(tmp_path / "palette.png", image, transparency=transparency)
    assert np.asarray(decode(path, "palette"))[0].tolist() == [[9, 8, 7], [255, 255, 255], [40, 50, 60]]
    assert not recwarn.list


def arrow():
    """Four colours, so that every orientation shows."""
    return np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[0, 0, 0], [90, 90, 90], [255, 255, 255]]], np.uint8)


# How the stored pixels become upright, by the meaning of EXIF's numbers.
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}


def oriented(path, number, pixels=None):
    exif = Image.Exif()
    exif[0x0112] = number
    Image.fromarray(arrow() if pixels is None else pixels).save(path, exif=exif)
    return path


@pytest.mark.parametrize("number", UPRIGHT)
@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_decode_exif_orientation(tmp_path, number, suffix):
    path = oriented(tmp_path / f"image.{suffix}", number)
    assert np.array_equal(np.asarray(decode(path, "image")), UPRIGHT[number](arrow()))


def test_decode_frame(tmp_path):
    path = oriented(tmp_path / "image.png", 6)
    assert decode(path, "image").size == decode(path, "image", frame=(2, 3)).size == (2, 3)
    assert np.array_equal(np.asarray(decode(path, "image", frame=(3, 2))), arrow())
    assert (image_size(path, (3, 2)), image_size(path, (2, 3)), image_size(path, (9, 9))) == ((3, 2), (2, 3), (2, 3))
    half_turn = oriented(tmp_path / "half.png", 3)  # both have one size: upright
    assert np.array_equal(np.asarray(decode(half_turn, "half", frame=(3, 2))), arrow()[::-1, ::-1])


def test_decode_damaged_exif(tmp_path):
    path = tmp_path / "image.png"
    Image.fromarray(arrow()).save(path, exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert np.array_equal(np.asarray(decode(path, "image")), arrow())


def test_decode_open_file(tmp_path):
    path = oriented(tmp_path / "image.png", 8)
    assert decode(io.BytesIO(path.read_bytes()), "bytes").size == (2, 3)


def noise(path):
    Image.effect_noise((64, 64), 50).save(path)
    return path


def broken_file(tmp_path, kind, monkeypatch):
    path = noise(tmp_path / "file.png")
    content = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "text":
        path.write_text("no image")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "link":
        path.unlink()
        path.symlink_to(tmp_path / "nowhere.png")
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif kind == "missing":
        path.unlink()
    elif kind == "postscript":
        path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    elif kind == "bomb":
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    elif kind == "denied":  # not by permissions, which root passes
        real = builtins.open
        monkeypatch.setattr(
            builtins, "open", lambda file, *a, **k: deny() if str(file) == str(path) else real(file, *a, **k)
        )
    return path


def deny():
    raise PermissionError(13, "Permission denied", "file.png")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "truncated"),
        ("text", "not an image"),
        ("empty", "not an image"),
        ("link", "a link to .*nowhere.png, which does not exist"),
        ("folder", "expected an image, found a folder"),
        ("pipe", "expected an image, found something other than a regular file"),
        ("missing", "no such file"),
        ("postscript", "not an image"),
        ("bomb", "exceeds limit"),
        ("denied", "Permission denied"),
    ],
)
def test_decode_broken_files(tmp_path, monkeypatch, kind, message):
    path = broken_file(tmp_path, kind, monkeypatch)
    with pytest.raises(BrokenSampleError, match=rf"^the name: .*{message}") as caught:
        decode(path, "the name")
    assert "\n" not in str(caught.value)


def test_decode_extreme_ratio(tmp_path):
    assert decode(saved(tmp_path / "long.png", Image.new("1", (3, 300))), "long").size == (3, 300)
    path = saved(tmp_path / "longer.png", Image.new("1", (3, 301)))
    with pytest.raises(BrokenSampleError, match="longer: expected sides in a ratio of at most 100 to 1, got 3 x 301"):
        decode(path, "longer")


def test_image_files_folders_and_names(tmp_path):
    folder = tmp_path / "pictures"
    (folder / "inner.png").mkdir(parents=True)
    for name in ("b.JPG", "a.png", "notes.txt"):
        (folder / name).touch()
    alone = tmp_path / "alone"  # named explicitly, so its suffix does not matter
    paths, problems = image_files([alone, folder])
    assert paths == [alone, folder / "a.png", folder / "b.JPG"]
    assert problems == []
    (folder / "a.png").unlink()
    (folder / "b.JPG").unlink()
    assert image_files([folder])[1] == [
        f"{folder}: expected images (.jpg, .jpeg, .png, .webp, .bmp, .gif, .tif, .tiff, .ppm, .jp2, .avif) "
        "in this folder, found 1 other files and 1 folders"
    ]


def test_image_files_patterns(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/2.jpg", "a/1.jpg", "a/b/3.jpg", "a/b/notes.txt", "[x].png"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert image_files(["a/*.jpg"])[0] == [Path("a/1.jpg"), Path("a/2.jpg")]
    assert image_files(["a/**/*"])[0] == [Path("a/1.jpg"), Path("a/2.jpg"), Path("a/b/3.jpg")]
    assert image_files(["[x].png"]) == ([Path("[x].png")], [])  # a file of this name is no pattern
    paths, (problem,) = image_files(["a/*.png"])
    assert paths == []
    assert problem.startswith("a/*.png: expected images (.jpg")
    assert problem.endswith("that match, found 0 other files and 0 folders")


def test_image_files_repeated(tmp_path):
    (tmp_path / "1.jpg").touch()
    assert image_files([tmp_path / "1.jpg", tmp_path, str(tmp_path / "*.jpg")]) == ([tmp_path / "1.jpg"], [])


def test_read_images_reports_broken(tmp_path):
    good, bad = noise(tmp_path / "good.png"), tmp_path / "bad.png"
    bad.touch()
    lines = []
    read = list(read_images([bad, good], ["first"], lines.append))
    assert [path for path, _ in read] == [good]
    assert lines == ["first", f"{bad}: not an image, or damaged at its beginning"]
    with pytest.raises(BrokenSampleError, match=r"bad\.png"):
        list(read_images([bad, good]))

"""Images with label maps, and the messages about bad ones, in ADE20K's layout."""

import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from ppma.config import ConfigError, build
from ppma.data.errors import BrokenSampleError
from ppma.data.label_maps import IGNORED
from ppma.data.scenes import SEMANTIC_CLASSES, compose
from ppma.data.scenes_files import write_scenes
from ppma.data.segmentation import SAMPLED_MAPS, SegmentationDataConfig, SegmentationImages, class_names


@pytest.fixture
def scenes(tmp_path):
    write_scenes(tmp_path / "scenes", train=4, val=2, size=64)
    return tmp_path / "scenes"


def as_ade20k(root, **changes):
    return SegmentationDataConfig(root=str(root), **{"labels": "ade20k"} | changes)


def as_plain(root, **changes):
    return as_ade20k(root, labels="plain", **changes)


def map_path(scenes, number=1):
    return scenes / "annotations" / "validation" / f"{number:06d}.png"


def write_map(scenes, values, number=1, **options):
    Image.fromarray(np.asarray(values), **options).save(map_path(scenes, number))


def rewrite_maps(scenes, change):
    """Change the values of all maps of the validation split."""
    for path in sorted((scenes / "annotations" / "validation").iterdir()):
        with Image.open(path) as image:
            values = np.asarray(image)
        Image.fromarray(change(values.astype(np.int64)).astype(np.uint8)).save(path)


def test_samples_of_scenes(scenes):
    held_out = SegmentationImages(as_ade20k(scenes), "validation")
    assert held_out.classes == SEMANTIC_CLASSES
    assert len(held_out) == 2
    image, labels = held_out[1]
    assert (image.shape, image.dtype, labels.dtype) == ((3, 64, 64), torch.float32, torch.int64)
    assert np.array_equal(labels, compose("val", 1, size=64).semantic)


def test_labels_ade20k(scenes):
    values = np.ones((64, 64), np.uint8)
    values[0, 0], values[0, 2] = 0, 11
    write_map(scenes, values)
    labels = SegmentationImages(as_ade20k(scenes), "validation")[0][1]
    assert labels[0, :4].tolist() == [IGNORED, 0, 10, 0]


def test_labels_plain(scenes):
    rewrite_maps(scenes, lambda values: values - 1)
    values = np.zeros((64, 64), np.uint8)
    values[0, 1], values[0, 2] = 10, 255
    write_map(scenes, values)
    held_out = SegmentationImages(as_plain(scenes), "validation")
    assert held_out[0][1][0, :4].tolist() == [0, 10, IGNORED, 0]
    assert np.array_equal(held_out[1][1], compose("val", 1, size=64).semantic)


def test_labels_ignore_index(scenes):
    values = np.full((64, 64), 3, np.uint8)
    values[0, 0], values[0, 1] = 11, 0  # 11 is the number of classes: void in many data sets
    for number in (1, 2):
        write_map(scenes, values, number)
    plain = SegmentationImages(as_plain(scenes, ignore_index=11), "validation")
    assert plain[0][1][0, :3].tolist() == [IGNORED, 0, 3]
    ade20k = SegmentationImages(as_ade20k(scenes, ignore_index=11), "validation")
    assert ade20k[0][1][0, :3].tolist() == [IGNORED, IGNORED, 2]


def test_labels_unset(scenes):
    expected = r"data.labels is not set: .*validation is read as 1 to 11 for 11 classes, 0 ignored \(labels: ade20k\)"
    with pytest.warns(UserWarning, match=expected):
        held_out = SegmentationImages(as_ade20k(scenes, labels=None), "validation")
    assert np.array_equal(held_out[1][1], compose("val", 1, size=64).semantic)


@pytest.mark.parametrize(
    ("labels", "value", "expected"),
    [
        ("ade20k", 12, r"label 12 out of range, expected 1 to 11 for 11 classes, 0 ignored \(labels: ade20k\)"),
        ("ade20k", 255, r"label 255 out of range, expected 1 to 11 .*; see data.labels and data.ignore_index"),
        ("plain", 11, r"label 11 out of range, expected 0 to 10 for 11 classes, 255 ignored \(labels: plain\)"),
        ("plain", 254, "label 254 out of range"),
    ],
)
def test_labels_out_of_range(scenes, labels, value, expected):
    rewrite_maps(scenes, lambda values: values - (labels == "plain"))
    data = as_ade20k(scenes, labels=labels)
    held_out = SegmentationImages(data, "validation")
    values = np.ones((64, 64), np.uint8)
    values[3, 4] = value
    write_map(scenes, values)
    with pytest.raises(ValueError, match=rf"000001.png: {expected}"):
        SegmentationImages(data, "validation")
    with pytest.raises(BrokenSampleError, match=rf"000001.png: {expected}"):
        held_out[0]


def test_label_map_16_bits(scenes):
    values = np.full((64, 64), 5, np.uint16)
    values[0, 0] = 300
    write_map(scenes, values)
    assert SegmentationImages(as_plain(scenes, ignore_index=300), "validation")[0][1][0, :2].tolist() == [IGNORED, 5]
    with pytest.raises(ValueError, match="label 300 out of range"):
        SegmentationImages(as_plain(scenes), "validation")


def test_label_map_palette(scenes):
    palette = Image.fromarray(np.tile(np.arange(1, 5, dtype=np.uint8), (64, 16)))
    palette.putpalette([200, 10, 30] * 256)
    palette.save(map_path(scenes))
    with Image.open(map_path(scenes)) as written:
        assert written.mode == "P"
    assert SegmentationImages(as_ade20k(scenes), "validation")[0][1][0, :4].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_label_map_few_bits(scenes, bits):
    """Pillow stretches such grey values to 0 to 255; tools that shrink PNG files write them."""
    rows = np.tile(np.arange(64) % min(11, 2**bits), (64, 1))
    shifted = rows.reshape(64, -1, 8 // bits) << np.arange(8 - bits, -1, -bits)
    raw = b"".join(b"\0" + bytes(row) for row in shifted.sum(-1).astype(np.uint8))
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", 64, 64, bits, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(raw)),
        (b"IEND", b""),
    ]
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    map_path(scenes).write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    assert np.array_equal(SegmentationImages(as_plain(scenes, ignore_index=11), "validation")[0][1], rows)


@pytest.mark.parametrize(("mode", "kind"), [("RGB", "PNG"), ("RGBA", "PNG"), ("LA", "PNG"), ("F", "TIFF")])
def test_label_map_bad_mode(scenes, mode, kind):
    Image.new(mode, (64, 64)).save(map_path(scenes), kind)
    with pytest.raises(ValueError, match=rf"000001.png: expected one label for each pixel .*, got {mode} pixels"):
        SegmentationImages(as_ade20k(scenes), "validation")


def test_label_map_jpeg(scenes):
    Image.new("L", (64, 64), 1).save(map_path(scenes), "JPEG")
    with pytest.raises(ValueError, match=r"000001.png: expected a lossless PNG, got JPEG, which changes labels"):
        SegmentationImages(as_ade20k(scenes), "validation")


def test_label_map_wrong_size(scenes):
    held_out = SegmentationImages(as_ade20k(scenes), "validation")
    write_map(scenes, np.ones((60, 64), np.uint8))
    for error, act in (
        (ValueError, lambda: SegmentationImages(as_ade20k(scenes), "validation")),
        (BrokenSampleError, lambda: held_out[0]),
    ):
        with pytest.raises(error, match=r"000001.png: 64 x 60 labels, but the image has 64 x 64 pixels"):
            act()


@pytest.mark.parametrize(("labels_size", "upright"), [((20, 40), True), ((40, 20), False)])
def test_label_map_exif_orientation(scenes, labels_size, upright):
    """The size of the label map tells whether it was made for the upright or for the stored image."""
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:10, :20] = 255  # the upper left, which orientation 6 shows in the upper right
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(scenes / "images" / "validation" / "000001.jpg", exif=exif, quality=95)
    write_map(scenes, np.ones(labels_size[::-1], np.uint8))
    image, labels = SegmentationImages(as_ade20k(scenes), "validation")[0]
    assert image.shape[1:] == labels.shape == labels_size[::-1]
    bright = image[0, 2, -3] if upright else image[0, 2, 2]
    assert bright > 0.9


def test_unreadable_files(scenes):
    map_path(scenes).write_bytes(b"broken")
    held_out = SegmentationImages(as_ade20k(scenes), "validation")
    assert held_out.counts.maps == 1
    with pytest.raises(BrokenSampleError, match=r"000001\.png: not an image"):
        held_out[0]
    (scenes / "images" / "validation" / "000002.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match="expected readable images and label maps, found none in a sample"):
        SegmentationImages(as_ade20k(scenes), "validation")


def test_histogram_text(scenes):
    values = np.ones((64, 64), np.uint8)
    values[0, :16], values[1] = 0, 3
    for number in (1, 2):
        write_map(scenes, values, number)
    counts = SegmentationImages(as_ade20k(scenes), "validation").counts
    assert counts.pixels[:3] == (2 * (64 * 64 - 80), 0, 128)
    assert counts.ignored == 32
    lines = counts.lines("here")
    assert lines[0] == "here: 2 of 2 label maps read; 1 to 11 for 11 classes, 0 ignored (labels: ade20k)"
    assert lines[1].split() == ["98.05%", "8,032", "background"]
    assert lines[2].split() == ["1.56%", "128", "1"]
    assert lines[3].split() == ["0.39%", "32", "(ignored)"]
    assert lines[4] == "  not in these maps: 0, 2, 3, 4, 5, 6, 7, 8, 9"


def test_histogram_sample_size(scenes):
    folder, maps = scenes / "images" / "validation", scenes / "annotations" / "validation"
    for number in range(3, 3 * SAMPLED_MAPS + 1):
        (folder / f"{number:06d}.jpg").symlink_to(folder / "000001.jpg")
        (maps / f"{number:06d}.png").symlink_to(maps / "000001.png")
    counts = SegmentationImages(as_ade20k(scenes), "validation").counts
    assert (counts.maps, counts.of) == (SAMPLED_MAPS, 3 * SAMPLED_MAPS)


def test_label_map_missing(scenes):
    data = as_ade20k(scenes)
    (scenes / "annotations" / "training" / "000002.png").unlink()
    with pytest.warns(UserWarning, match=r"skipped 1 images without a label map, such as .*000002\.png"):
        train = SegmentationImages(data, "training")
    assert len(train) == 3
    for path in (scenes / "annotations" / "training").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="expected images with label maps"):
        SegmentationImages(data, "training")
    with pytest.raises(ValueError, match=r"data.root: expected a folder .*images/testing, found none"):
        SegmentationImages(data, "testing")


def test_class_names_sources(scenes):
    renamed = tuple("abcdefghijk")
    assert class_names(as_ade20k(scenes, classes=renamed)) == renamed
    with pytest.raises(ValueError, match=r"data.classes: expected 11 names, as .*classes.txt has, got 2"):
        class_names(as_ade20k(scenes, classes=("a", "b")))
    (scenes / "classes.txt").unlink()
    with pytest.raises(ValueError, match=r"data.classes: expected names, or classes.txt or objectInfo150.txt in"):
        class_names(as_ade20k(scenes))
    table = (
        "Idx\tRatio\tTrain\tVal\tStuff\tName\n1\t0.15\t11664\t1172\t1\twall\n2\t0.1\t6046\t612\t1\tbuilding, edifice\n"
    )
    (scenes / "objectInfo150.txt").write_text(table)
    assert class_names(as_ade20k(scenes)) == ("wall", "building, edifice")
    (scenes / "classes.txt").write_text("wall\nroof\nwall\n")
    with pytest.raises(ValueError, match=r"classes.txt: expected different names, found 'wall' more than once"):
        class_names(as_ade20k(scenes))
    (scenes / "classes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"classes.txt: expected text in UTF-8"):
        class_names(as_ade20k(scenes))
    with pytest.raises(ConfigError, match="classes: expected 2 to 254 names"):
        SegmentationDataConfig(root="", classes=("alone",))
    with pytest.raises(ConfigError, match="classes: expected different names"):
        SegmentationDataConfig(root="", classes=("one", "one"))


def test_scaled_size():
    data = SegmentationDataConfig(root="", short_side=512, long_side=2048)
    assert data.scaled(300, 400) == (512, 683)
    assert data.scaled(100, 1000) == (205, 2048)
    assert data.scaled(300, 400, 0.5) == (256, 341)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"short_side": 100, "long_side": 50}, "short_side: expected 1 to long_side"),
        ({"long_side": 10**9}, "long_side: expected at most 16384, got 1000000000"),
        ({"ignore_index": -1}, "ignore_index: expected 0 to 65535, or null"),
        ({"labels": "city"}, "labels: expected one of 'ade20k', 'plain'"),
        ({"name": "cityscape"}, "name: expected one of ade20k, cityscapes, folder, pets, got 'cityscape'"),
        ({"std": [1, 0, 1]}, "std: expected finite numbers > 0"),
    ],
)
def test_config_errors(values, message):
    with pytest.raises(ConfigError, match=message):
        build(SegmentationDataConfig, {"root": "", **values})

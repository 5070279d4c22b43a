"""Data sets of labelled images, and the messages about malformed ones."""

import dataclasses
import gzip
import io
import struct
import tarfile
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from ppma.config import ConfigError, build
from ppma.data import arrays
from ppma.data.errors import BrokenSampleError
from ppma.data.images import (
    AugmentConfig,
    ImageDataConfig,
    open_images,
    open_training_images,
    train_transform,
)
from ppma.data.preprocessing import Preprocessing
from ppma.data.source import stratified


def picture(value: int) -> Image.Image:
    return Image.fromarray(np.full((12, 10, 3), value, np.uint8))


def png(value: int) -> bytes:
    buffer = io.BytesIO()
    picture(value).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Two splits of three classes, with two images each."""
    for split in ("train", "validation"):
        for number, name in enumerate(("ant", "bee", "cow")):
            (tmp_path / split / name).mkdir(parents=True)
            for image in range(2):
                picture(40 * number + image).save(tmp_path / split / name / f"{image}.png")
    return tmp_path


def test_digits_are_uci_test_set():
    images, labels = arrays.digit_arrays()
    assert images.shape == (1797, 8, 8)
    assert images.max() == 255
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_splits_disjoint():
    seen = {}
    for split in arrays.DIGIT_SPLITS:
        source = arrays.digits(split)
        assert set(source.labels()) == set(range(10))
        for index in range(len(source)):
            seen.setdefault(source[index][0].tobytes(), set()).add(split)
    assert len(seen) == 1797
    assert all(len(splits) == 1 for splits in seen.values())
    with pytest.raises(ValueError, match="the digits have train, val, test, got 'valid'"):
        arrays.digits("valid")


def test_stratified_disjoint_and_balanced():
    labels = [0] * 50 + [1] * 20
    first, second = stratified(labels, [0.5, 0.3], seed=1)
    assert not set(first) & set(second)
    assert [labels[i] for i in first].count(0) == 25
    assert [labels[i] for i in second].count(1) == 6


def test_train_fraction_balanced():
    source = open_training_images(ImageDataConfig(name="digits", train_fraction=0.04))
    assert np.bincount(source.labels()).tolist() == [5] * 10


def test_folder_labels(folder):
    source = open_images(ImageDataConfig(root=str(folder)), "val")  # found as "validation"
    assert source.classes == ("ant", "bee", "cow")
    assert source.labels() == [0, 0, 1, 1, 2, 2]
    image, label = source[3]
    assert (image.getpixel((0, 0)), label) == ((41, 41, 41), 1)


def test_folder_empty_class(folder):
    (folder / "train" / "bat").mkdir()
    with pytest.raises(ValueError, match=r"no image in 1 class folders of .*train: bat"):
        open_images(ImageDataConfig(root=str(folder)), "train")


def test_folder_images_outside_classes(folder):
    (folder / "bare").mkdir()
    with pytest.raises(ValueError, match=r"expected one folder for each class in .*bare, found no folders"):
        open_images(ImageDataConfig(root=str(folder)), "bare")
    picture(1).save(folder / "train" / "stray.png")  # would be a class without a name, the first one
    with pytest.raises(ValueError, match=r"expected images in class folders only, found some directly in .*train"):
        open_images(ImageDataConfig(root=str(folder)), "train")


def test_folder_duplicate_class_name(folder):
    for name in ("ant", "bee"):
        (folder / "train" / name / "large").mkdir()
        picture(1).save(folder / "train" / name / "large" / "9.png")
    with pytest.raises(ValueError, match=r"train/ant/large and .*train/bee/large would be one class, 'large'"):
        open_images(ImageDataConfig(root=str(folder)), "train")


def test_folder_missing(folder):
    with pytest.raises(ValueError, match="expected a folder, found none at"):
        open_images(ImageDataConfig(root=str(folder / "nowhere")), "train")
    with pytest.raises(ValueError, match="expected a folder 'test'"):
        open_images(ImageDataConfig(root=str(folder)), "test")


@pytest.fixture
def unsplit(tmp_path):
    """Twenty images of one class and ten of another, in class folders alone."""
    for name, count in (("ant", 20), ("bee", 10)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


@pytest.mark.parametrize("layout", ["classes", "train"])
def test_folder_without_validation_is_split(unsplit, layout):
    root = unsplit
    if layout == "train":
        root = unsplit.parent / "root"
        root.mkdir()
        unsplit.rename(root / "train")
    data = ImageDataConfig(root=str(root), val_fraction=0.2)
    train = open_images(data, "train")
    with pytest.warns(UserWarning, match=r"no folder 'val' in .*: validating on 6 of 30 .*split of 20% with seed 0"):
        val = open_images(data, "val")
    assert (train.classes, val.classes) == (("ant", "bee"), ("ant", "bee"))
    assert (Counter(train.labels()), Counter(val.labels())) == ({0: 16, 1: 8}, {0: 4, 1: 2})
    assert not set(train.indices) & set(val.indices)
    assert len(open_training_images(dataclasses.replace(data, train_fraction=0.5))) == 12


def test_folder_split_is_reproducible(unsplit):
    data = ImageDataConfig(root=str(unsplit))
    with pytest.warns(UserWarning, match="validating on 3 of 30"):
        assert open_images(data, "val").indices == open_images(data, "val").indices


def test_folder_split_too_small(unsplit):
    with pytest.raises(ValueError, match=r"data.val_fraction: 0.01 of 30 images leaves none to validate on"):
        open_images(ImageDataConfig(root=str(unsplit), val_fraction=0.01), "val")


def test_folder_with_test_images_alone(unsplit):
    unsplit.rename(unsplit.parent / "test")
    with pytest.raises(ValueError, match="expected a folder 'train'"):
        open_images(ImageDataConfig(root=str(unsplit.parent)), "train")


@pytest.mark.parametrize("damage", ["truncated", "text", "empty"])
def test_folder_broken_image(folder, damage):
    path = folder / "train" / "bee" / "1.png"
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(path)
    content = path.read_bytes()
    path.write_bytes({"truncated": content[: len(content) // 2], "text": b"not an image", "empty": b""}[damage])
    source = open_images(ImageDataConfig(root=str(folder)), "train")
    with pytest.raises(BrokenSampleError, match=r"train/bee/1\.png: \w+"):
        source[3]


def test_folder_unreadable_files(folder, monkeypatch):
    path = folder / "train" / "bee" / "1.png"
    path.unlink()
    path.symlink_to("nowhere.png")
    source = open_images(ImageDataConfig(root=str(folder)), "train")
    assert len(source) == 6
    with pytest.raises(BrokenSampleError, match=r"train/bee/1\.png: No such file"):
        source[3]

    def deny(index):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(source.reader), "__getitem__", lambda reader, index: deny(index))  # root may read all
    with pytest.raises(BrokenSampleError, match=r"train/ant/0\.png: Permission denied"):
        source[0]


def test_folder_image_formats(folder):
    picture(200).save(folder / "train" / "bee" / "2.tif")
    picture(201).save(folder / "train" / "bee" / "3.webp", lossless=True)
    source = open_images(ImageDataConfig(root=str(folder)), "train")
    assert source.labels() == [0, 0, 1, 1, 1, 1, 2, 2]
    assert [source[index][0].getpixel((0, 0))[0] for index in (4, 5)] == [200, 201]


def test_exif_orientation_folder_and_shards(folder):
    exif = Image.Exif()
    exif[0x0112] = 8
    path = folder / "train" / "ant" / "0.png"
    picture(0).save(path, exif=exif)
    assert open_images(ImageDataConfig(root=str(folder)), "train")[0][0].size == (12, 10)
    shard(folder / "up.tar", [("1.png", path.read_bytes()), ("1.cls", b"0")])
    assert open_images(ImageDataConfig(name="webdataset", root=str(folder)), "up")[0][0].size == (12, 10)


def test_tar_class_folders(folder):
    with tarfile.open(folder / "train.tar", "w") as archive:
        archive.add(folder / "train", arcname=".")
    source = open_images(ImageDataConfig(name="tar", root=str(folder)), "train")
    assert source.classes == ("ant", "bee", "cow")
    assert len(source) == 6
    assert source[5][0].getpixel((0, 0)) == (81, 81, 81)
    with pytest.raises(ValueError, match=r"expected test\*\.tar"):
        open_images(ImageDataConfig(name="tar", root=str(folder)), "test")


def shard(path, samples):
    with tarfile.open(path, "w") as archive:
        for name, content in samples:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def test_tar_webdataset(tmp_path):
    for number in range(2):
        samples = []
        for image in range(3):
            samples += [(f"{number}{image}.png", png(10 * number + image)), (f"{number}{image}.cls", b"%d" % image)]
        shard(tmp_path / f"train-{number:04d}.tar", samples)
    source = open_images(ImageDataConfig(name="webdataset", root=str(tmp_path)), "train")
    assert source.labels() == [0, 1, 2, 0, 1, 2]
    assert source.classes == ("0", "1", "2")
    assert source[4][0].getpixel((0, 0)) == (11, 11, 11)
    with pytest.raises(ValueError, match=r"expected val\*\.tar"):
        open_images(ImageDataConfig(name="webdataset", root=str(tmp_path)), "val")
    shard(tmp_path / "bad.tar", [("1.png", png(1))])
    with pytest.raises(ValueError, match=r"bad.tar:1.png: expected a number in 1.cls, found none"):
        open_images(ImageDataConfig(name="webdataset", root=str(tmp_path)), "bad")
    shard(tmp_path / "broken.tar", [("1.png", b"no"), ("1.cls", b"0")])
    with pytest.raises(BrokenSampleError, match=r"broken\.tar:1\.png"):
        open_images(ImageDataConfig(name="webdataset", root=str(tmp_path)), "broken")[0]


def test_tar_unreadable(tmp_path):
    (tmp_path / "train-0.tar").symlink_to("nowhere.tar")
    with pytest.raises(ValueError, match=r"train-0.tar: not a readable archive \(.*No such file"):
        open_images(ImageDataConfig(name="webdataset", root=str(tmp_path)), "train")
    (tmp_path / "train-0.tar").unlink()
    shard(tmp_path / "train-0.tar", [("1.png", png(1)), ("1.cls", b"007")])
    source = open_images(ImageDataConfig(name="webdataset", root=str(tmp_path)), "train")
    assert (len(source.classes), source.labels()) == (8, [7])
    (tmp_path / "train-0.tar").unlink()  # in the middle of a run
    with pytest.raises(BrokenSampleError, match=r"train-0\.tar:1\.png: No such file"):
        source[0]
    for number in (b"99999999999", b"1000000", "\u0663".encode()):  # no list of so many classes is made
        shard(tmp_path / "train-0.tar", [("1.png", png(1)), ("1.cls", number)])
        with pytest.raises(ValueError, match=r"1.png: expected a number in 1.cls, found"):
            open_images(ImageDataConfig(name="webdataset", root=str(tmp_path)), "train")


@pytest.mark.parametrize("content", [b"", b"\0\0\x08", b"\0\0\x08\xff" + bytes(8), b"\0\0\x08\x01\xff\xff\xff\xff"])
def test_idx_damaged(tmp_path, content):
    for packed in (True, False):
        path = tmp_path / ("x.gz" if packed else "x")
        path.write_bytes(gzip.compress(content) if packed else content)
        with pytest.raises(ValueError, match=rf"{path.name}: expected an IDX file of unsigned bytes"):
            arrays.read_idx(path)
    (tmp_path / "cut.gz").write_bytes(gzip.compress(content)[:-9])
    with pytest.raises(ValueError, match=r"cut.gz: expected an IDX file"):
        arrays.read_idx(tmp_path / "cut.gz")


def test_idx_contradictory(tmp_path):
    for labels, message in (
        ([7], r"found \(2, 3, 4\) and \(1,\)"),
        ([7, 10], "expected labels from 0 to 9 in .*, found 10"),
    ):
        for part, values in {
            "images-idx3": np.zeros((2, 3, 4), np.uint8),
            "labels-idx1": np.array(labels, np.uint8),
        }.items():
            raw = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()
            (tmp_path / f"train-{part}-ubyte").write_bytes(raw)
        with pytest.raises(ValueError, match=message):
            open_images(ImageDataConfig(name="fashion_mnist", root=str(tmp_path)), "train")


@pytest.mark.parametrize("packed", [True, False])
def test_idx_images(tmp_path, packed):
    images = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    parts = {"images-idx3": images, "labels-idx1": np.array([7, 1], np.uint8)}
    for part, values in parts.items():
        raw = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()
        name = f"t10k-{part}-ubyte" + (".gz" if packed else "")
        (tmp_path / name).write_bytes(gzip.compress(raw) if packed else raw)
    source = open_images(ImageDataConfig(name="fashion_mnist", root=str(tmp_path)), "val")
    assert source.labels() == [7, 1]
    assert source.classes[7] == "Sneaker"
    assert source[1][0].getpixel((3, 2)) == (23, 23, 23)
    with pytest.raises(ValueError, match="expected train-images-idx3-ubyte"):
        open_images(ImageDataConfig(name="fashion_mnist", root=str(tmp_path)), "train")


def test_open_images_unknown_name():
    with pytest.raises(ValueError, match="is a stream, which cannot be resumed exactly"):
        open_images(ImageDataConfig(name="wds/x", root="."), "train")
    with pytest.raises(ValueError, match=r"data\.name, data\.root: torch/nothing"):
        open_images(ImageDataConfig(name="torch/nothing", root="."), "train")


def test_data_root_missing():
    with pytest.raises(ConfigError, match="root: expected the location of the 'folder' data"):
        build(ImageDataConfig, {"name": "folder"})


def test_transforms_shape():
    data = ImageDataConfig(name="digits", image_size=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), crop_pct=1.0)
    white = Image.fromarray(np.full((8, 8, 3), 255, np.uint8))
    assert Preprocessing.from_config(data).transform()(white).shape == (3, 32, 32)
    assert Preprocessing.from_config(data).transform()(white).unique().tolist() == [1.0]
    rich = AugmentConfig(auto_augment="rand-m9-mstd0.5-inc1", color_jitter=0.4, erasing=1.0)
    assert train_transform(data, rich)(white).shape == (3, 32, 32)

"""CIFAR-10 in both versions of its files."""

import os
import pickle
import struct

import numpy as np
import pytest
from PIL import Image

from ppma.data.cifar import CLASSES, cifar10_images, read_batch

COUNT = 100  # images of each file, ten of each class


def batch(seed):
    images = np.random.default_rng(seed).integers(0, 256, (COUNT, 3072), np.uint8)
    return images, np.arange(COUNT) % 10


def old_pickle(images, labels):
    """What Python 2 wrote: protocol 2, byte strings, an array by `_reconstruct`."""

    def text(value):
        return b"U" + bytes([len(value)]) + value  # SHORT_BINSTRING

    def number(value):
        return b"J" + struct.pack("<i", value)

    raw = images.tobytes()
    dtype = (
        b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|") + b"NNN" + number(-1) * 2 + b"K\x00tb"
    )
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR"
    state = (
        b"(K\x01(" + number(len(images)) + number(3072) + b"t" + dtype + b"\x89T" + struct.pack("<i", len(raw)) + raw
    )
    listed = b"](" + b"".join(number(int(label)) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + state + b"tb" + text(b"labels") + listed + b"u."


def write(folder, version):
    folder.mkdir(parents=True)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for seed, name in enumerate(names):
        images, labels = batch(seed)
        if version == "bin":
            content = np.concatenate([labels[:, None].astype(np.uint8), images], 1).tobytes()
            (folder / f"{name}.bin").write_bytes(content)
        elif version == "old":
            (folder / name).write_bytes(old_pickle(images, labels))
        else:
            content = {b"data": images, b"labels": labels.tolist(), b"filenames": [b"a.png"] * COUNT}
            (folder / name).write_bytes(pickle.dumps(content, protocol=int(version)))


@pytest.mark.parametrize("version", ["bin", "old", "2", "4"])
def test_splits(version, tmp_path):
    write(tmp_path / f"cifar-10-batches-{'bin' if version == 'bin' else 'py'}", version)
    opened = {split: cifar10_images(str(tmp_path), split) for split in ("train", "val", "trainval", "test")}
    assert {split: len(source) for split, source in opened.items()} == {
        "train": 480, "val": 20, "trainval": 500, "test": 100,
    }  # fmt: skip
    assert opened["val"].classes == CLASSES
    assert sorted(opened["val"].labels()) == sorted([*range(10)] * 2)
    images, labels = batch(5)
    image, label = opened["test"][13]
    assert isinstance(image, Image.Image)
    assert label == labels[13]
    assert np.array_equal(np.asarray(image).transpose(2, 0, 1).ravel(), images[13])
    held = {opened["val"][index][0].tobytes() for index in range(20)}
    kept = {opened["train"][index][0].tobytes() for index in range(480)}
    assert len(held | kept) == 500


def test_root_itself(tmp_path):
    write(tmp_path / "files", "bin")
    assert len(cifar10_images(str(tmp_path / "files"), "test")) == COUNT


class Payload:
    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_read_batch_pickled_code(tmp_path):
    path = tmp_path / "test_batch"
    path.write_bytes(pickle.dumps({b"data": Payload(tmp_path / "executed"), b"labels": [0]}))
    with pytest.raises(ValueError, match=r"expected a file of CIFAR-10's Python version: it names \w+.mkdir"):
        read_batch(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("test_batch", b"no pickle"),
        ("test_batch", pickle.dumps({b"data": b"", b"labels": [0]})),
        ("test_batch", pickle.dumps([1, 2])),
        ("test_batch", pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]})),
        ("test_batch", pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]})),
        ("test_batch.bin", bytes(3072)),
        ("test_batch.bin", b""),
    ],
)
def test_read_batch_damaged(name, content, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}: expected a file of CIFAR-10's (Python|binary) version") as error:
        read_batch(path)
    assert "\n" not in str(error.value)


def test_cifar10_images_mistakes(tmp_path):
    with pytest.raises(ValueError, match=r"expected cifar-10-batches-py or cifar-10-batches-bin with data_batch_1 in"):
        cifar10_images(str(tmp_path), "train")
    with pytest.raises(ValueError, match="CIFAR-10 has train, val, trainval, test, got 'valid'"):
        cifar10_images(str(tmp_path), "valid")

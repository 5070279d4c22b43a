"""Damaged images, label maps and annotation files: each is read, or is one line of the project's own errors.

Every case follows from the seed, which a failure prints: PPMA_FUZZ_SEED=... repeats it.
"""

import contextlib
import copy
import io
import json
import os
import random
import signal
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from ppma.data.coco import CocoDataConfig, CocoInstances
from ppma.data.coco_transforms import CocoAugmentConfig, train_transform
from ppma.data.decoding import decode
from ppma.data.errors import BrokenSampleError
from ppma.data.label_maps import IGNORED
from ppma.data.scenes_files import write_scenes
from ppma.data.segmentation import SegmentationDataConfig, SegmentationImages
from ppma.tasks.detection.metrics import CocoMetrics

SEED = int(os.environ.get("PPMA_FUZZ_SEED", "0"))
SECONDS = 20  # for one case: what takes longer hangs
SIZE = 48

QUICK, SLOW = 50, 500  # cases of each of the three kinds


def counts(quick, slow):
    return pytest.mark.parametrize(
        ("seed", "cases"), [(SEED, quick), pytest.param(SEED + 1, slow, marks=pytest.mark.slow)], ids=["quick", "slow"]
    )


@contextlib.contextmanager
def no_longer_than(seconds):
    def stop(*_):
        raise AssertionError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def one_case(seed, number):
    """An unexpected exception fails with the seed that reproduces it."""
    try:
        with warnings.catch_warnings(), no_longer_than(SECONDS):
            warnings.simplefilter("ignore")
            yield random.Random(f"{seed} {number}")
    except BaseException as error:
        raise AssertionError(f"PPMA_FUZZ_SEED={SEED}: case {number} of seed {seed}: {error!r}") from error


def read_or_told(read, expected, place):
    """What `read` gives, or None where it raises the expected error in one line that begins with the place or key."""
    try:
        return read()
    except expected as error:
        kind, message = type(error), str(error)
    assert kind is expected or (expected is BrokenSampleError and issubclass(kind, expected)), kind
    assert message.startswith((str(place), "data.")), message
    assert "\n" not in message
    return None


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A file with some bytes changed, cut, doubled, or with another number in it."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        place = rng.randrange(len(changed) + 1)
        # Half of the damage goes where the structure is: at the beginning.
        place = min(place, rng.randrange(200)) if rng.random() < 0.5 else place
        kind = rng.choice(("flip", "cut", "insert", "remove", "number", "repeat"))
        if kind == "flip" and place < len(changed):
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == "cut" and rng.random() < 0.3:
            del changed[place:]
        elif kind == "insert":
            changed[place:place] = rng.randbytes(rng.randrange(1, 9))
        elif kind == "remove":
            del changed[place : place + rng.randrange(1, 9)]
        elif kind == "number":
            number = rng.choice((0, 1, 2**7, 2**15 - 1, 2**16, 2**31 - 1, 2**32 - 1))
            changed[place : place + 4] = number.to_bytes(4, rng.choice(("big", "little")))
        elif kind == "repeat":
            changed[place:place] = changed[place : place + rng.randrange(1, 64)]
    return bytes(changed)


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def valid_images():
    """Files of every mode and format that matters."""
    rng = np.random.default_rng(0)
    colours = Image.fromarray(rng.integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = Image.fromarray(rng.integers(0, 65535, (SIZE, SIZE), dtype=np.uint16))
    floats = Image.fromarray(rng.random((SIZE, SIZE), dtype=np.float32))
    return [
        *(encoded(colours, kind) for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000")),
        *(encoded(colours, kind, exif=exif) for kind in ("PNG", "JPEG", "WEBP", "TIFF")),
        *(encoded(colours.convert(mode), "PNG") for mode in ("1", "L", "P", "LA", "RGBA")),
        *(encoded(colours.convert(mode), "TIFF", compression="tiff_lzw") for mode in ("L", "CMYK")),
        *(encoded(deep, kind) for kind in ("PNG", "TIFF")),
        encoded(floats, "TIFF"),
    ]


@counts(QUICK, SLOW)
def test_fuzz_images(tmp_path, monkeypatch, seed, cases):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2_000_000)  # bounds memory, not what is tested
    images, path = valid_images(), tmp_path / "image"
    read = 0
    for number in range(cases):
        with one_case(seed, number) as rng:
            path.write_bytes(damaged(rng.choice(images), rng))
            frame = rng.choice((None, (SIZE, SIZE), (3, 5)))
            image = read_or_told(
                lambda frame=frame: decode(path, "the image", frame=frame), BrokenSampleError, "the image"
            )
            if image is not None:
                assert (image.mode, np.asarray(image).shape) == ("RGB", (image.height, image.width, 3))
                read += 1
    assert 0 < read < cases


@pytest.fixture
def scenes(tmp_path):
    write_scenes(tmp_path / "scenes", train=2, val=1, size=SIZE)
    return tmp_path / "scenes"


def valid_maps():
    labels = np.random.default_rng(0).integers(0, 11, (SIZE, SIZE))
    grey = Image.fromarray(labels.astype(np.uint8))
    palette = grey.copy()
    palette.putpalette(range(33))
    deep = Image.fromarray(labels.astype(np.uint16))
    shapes = [np.full(shape, 3, np.uint8) for shape in ((SIZE, 1), (1, SIZE), (SIZE + 1, SIZE))]
    return [
        *(encoded(image, "PNG") for image in (grey, palette, deep, *map(Image.fromarray, shapes))),
        *(encoded(grey.convert(mode), "PNG") for mode in ("1", "LA", "RGB")),
        *(encoded(grey, kind) for kind in ("TIFF", "BMP", "JPEG", "GIF")),
    ]


@counts(QUICK, SLOW)
def test_fuzz_label_maps(scenes, seed, cases):
    maps, path = valid_maps(), scenes / "annotations" / "training" / "000001.png"
    read = 0
    for number in range(cases):
        with one_case(seed, number) as rng:
            data = SegmentationDataConfig(
                root=str(scenes), labels=rng.choice(("ade20k", "plain")), ignore_index=rng.choice((None, None, 255, 11))
            )
            content = rng.choice(maps)
            path.write_bytes(content if rng.random() < 0.2 else damaged(content, rng))
            if rng.random() < 0.2:
                (scenes / "classes.txt").write_bytes(damaged((scenes / "classes.txt").read_bytes(), rng))
            images = read_or_told(lambda data=data: SegmentationImages(data, "training"), ValueError, scenes)
            write_names(scenes)
            if images is None:
                continue
            sample = read_or_told(lambda images=images: images[0], BrokenSampleError, scenes)
            if sample is not None:
                image, labels = sample
                assert image.shape[1:] == labels.shape == (SIZE, SIZE)
                assert set(labels.unique().tolist()) <= {*range(len(images.classes)), IGNORED}
                read += 1
    assert 0 < read < cases


def write_names(scenes):
    (scenes / "classes.txt").write_text("background\n" + "\n".join("0123456789") + "\n")


VALUES = [
    *(None, True, False, 0, 1, -1, 2, 7, 0.5, -0.0, 1e9, 1e308, -1e308, 10**30, float("nan"), float("inf")),
    *("", "1", "x", "é\u0000", "../../..", "o" * 100, "0" * 100, [], {}, [[]], [1], [1, 2, 3, 4], {"id": 1}),
    *([0, 0, 1e8, 0, 1e8, 1e8], [[0, 0, 9, 0, 9, 9]], {"size": [SIZE, SIZE], "counts": [SIZE * SIZE]}),
    *({"size": [10**6, 10**6], "counts": "0"}, {"size": [SIZE, SIZE], "counts": "PPPPPP"}),
]


def places(tree, found=None):
    """Every place in a JSON tree, as a container and its key."""
    found = [] if found is None else found
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        found.append((tree, key))
        if isinstance(tree[key], dict | list):
            places(tree[key], found)
    return found


def disturb(tree, rng):
    """Change some places of a JSON tree: other values and types, lost, doubled and exchanged entries."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        found = places(tree)
        if not found:
            return
        container, key = rng.choice(found)
        kind = rng.choice(("value", "value", "value", "remove", "double", "exchange", "wrap", "rename"))
        if kind == "value":
            container[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind == "remove":
            del container[key]
        elif kind == "double" and isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        elif kind == "exchange":
            other, place = rng.choice(found)
            container[key] = copy.deepcopy(other[place])
        elif kind == "wrap":
            container[key] = rng.choice(([container[key]], {"id": container[key]}))
        elif kind == "rename" and isinstance(container, dict):
            container[rng.choice(("id", "name", "bbox", "x"))] = container.pop(key)


def blind(images):
    """A model that finds nothing."""
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0).long(), "scores": torch.zeros(0)}
    return [nothing | {"masks": torch.zeros(0, 1, *image.shape[1:])} for image in images]


def sharp(images):
    """A model that finds the whole image, in the first class."""
    return [
        {
            "boxes": torch.tensor([[0.0, 0, image.shape[2], image.shape[1]]]),
            "labels": torch.tensor([1]),
            "scores": torch.tensor([0.9]),
            "masks": torch.ones(1, 1, *image.shape[1:]),
        }
        for image in images
    ]


def check_training_sample(sample, classes):
    image, target = sample
    assert image.isfinite().all()
    assert target["boxes"].isfinite().all()
    assert target["masks"].shape == (len(target["boxes"]), *image.shape[1:])
    assert ((target["labels"] >= 1) & (target["labels"] <= classes)).all()


@counts(QUICK, SLOW)
def test_fuzz_annotations(scenes, seed, cases):
    path = scenes / "annotations" / "instances_train2017.json"
    text = path.read_text()
    tree = json.loads(text)
    polygon = [[2.0, 2, 30, 2, 30, 30, 2, 30], [1, 1, 9, 1, 9, 9]]
    tree["annotations"][0]["segmentation"] = polygon
    tree["annotations"].append(
        tree["annotations"][1]
        | {"id": 99, "iscrowd": 1, "segmentation": {"size": [SIZE, SIZE], "counts": [9, SIZE**2 - 9]}}
    )
    data = CocoDataConfig(root=str(scenes))
    augment = train_transform(CocoAugmentConfig(short_sides=(SIZE,), long_side=SIZE))
    read = 0
    for number in range(cases):
        with one_case(seed, number) as rng:
            if rng.random() < 0.8:
                changed = copy.deepcopy(tree)
                disturb(changed, rng)
                path.write_text(json.dumps(changed))
            else:
                path.write_bytes(damaged(json.dumps(tree).encode(), rng))
            for transform in (augment, None):
                images = read_or_told(lambda t=transform: CocoInstances(data, "train2017", t), ValueError, scenes)
                if images is None:
                    continue
                samples = [
                    read_or_told(lambda images=images, index=index: images[index], BrokenSampleError, scenes)
                    for index in range(len(images))
                ]
                samples = [sample for sample in samples if sample is not None]
                read += bool(samples)
                if transform is not None:
                    for sample in samples:
                        check_training_sample(sample, len(images.classes))
                    continue
                for model in (blind, sharp):
                    metrics = CocoMetrics(images.classes)
                    for image, truth in samples:
                        metrics.update(model, ([image], [truth]))
                    assert all(0 <= value <= 100 for value in metrics.compute([metrics.state()]).values())
    assert 0 < read < 2 * cases

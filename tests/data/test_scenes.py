"""Synthetic scenes and their annotations."""

import hashlib
import json

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as rle
from pycocotools.coco import COCO

from ppma.data.arrays import digit_arrays, digits
from ppma.data.scenes import SEMANTIC_CLASSES, SPLITS, compose
from ppma.data.scenes_files import write_scenes
from ppma_cli import main

SCENES = [compose(split, index, size=96) for split in SPLITS for index in range(20)]


def test_compose_deterministic():
    again = compose("train", 3, seed=1, size=64)
    assert np.array_equal(again.image, compose("train", 3, seed=1, size=64).image)
    for other in (
        compose("train", 4, seed=1, size=64),
        compose("val", 3, seed=1, size=64),
        compose("train", 3, size=64),
    ):
        assert not np.array_equal(again.image, other.image)


def test_compose_annotations_agree():
    for scene in SCENES:
        assert len(scene.labels) == len(scene.masks) == len(scene.boxes)
        assert scene.masks.sum(0).max() <= 1
        assert np.array_equal(scene.semantic > 0, scene.masks.any(0))
        for label, mask, (left, top, right, bottom) in zip(scene.labels, scene.masks, scene.boxes, strict=True):
            assert (scene.semantic[mask] == label + 1).all()
            assert mask[top:bottom, left:right].sum() == mask.sum() > 0
            assert mask[top].any()
            assert mask[bottom - 1].any()
            assert mask[:, left].any()
            assert mask[:, right - 1].any()


def test_compose_variety():
    counts = [len(scene.labels) for scene in SCENES]
    assert max(counts) >= 4
    assert np.mean(counts) > 2
    assert {int(label) for scene in SCENES for label in scene.labels} == set(range(10))
    touching = [
        scene
        for scene in SCENES
        for a, box in enumerate(scene.boxes)
        for other in scene.boxes[:a]
        if (np.maximum(box[:2], other[:2]) < np.minimum(box[2:], other[2:])).all()
    ]
    assert touching


def test_compose_held_out_digits():
    images, _ = digit_arrays()
    assert len({image.tobytes() for image in images}) == len(images)
    assert not set(digits(SPLITS["train"]).indices) & set(digits(SPLITS["val"]).indices)


def test_write_scenes_layouts_agree(tmp_path, capsys):
    out = tmp_path / "scenes"
    command = ["data", "scenes", "--out", str(out), "--train", "3", "--val", "2", "--size", "64"]
    assert main(command) == 0
    assert f"ppma train scenes_maskrcnn_nano data.root={out}" in capsys.readouterr().out
    assert (out / "classes.txt").read_text().split() == list(SEMANTIC_CLASSES)
    for split, coco_name, ade_name, count in (
        ("train", "train2017", "training", 3),
        ("val", "val2017", "validation", 2),
    ):
        truth = COCO(out / "annotations" / f"instances_{coco_name}.json")
        assert len(truth.imgs) == count
        for index, (image_id, described) in enumerate(truth.imgs.items()):
            scene = compose(split, index, size=64)
            with Image.open(out / coco_name / described["file_name"]) as image:
                assert np.abs(np.asarray(image).astype(float) - scene.image).mean() < 6  # JPEG
            found = truth.loadAnns(truth.getAnnIds(image_id))
            assert [truth.cats[one["category_id"]]["name"] for one in found] == [str(label) for label in scene.labels]
            masks = [truth.annToMask(one).astype(bool) for one in found]
            assert np.array_equal(masks, scene.masks)
            assert np.array_equal([rle.toBbox(truth.annToRLE(one)) for one in found], [one["bbox"] for one in found])
            stem = described["file_name"].split(".")[0]
            with Image.open(out / "annotations" / ade_name / f"{stem}.png") as labels:
                assert np.array_equal(np.asarray(labels), scene.semantic + 1)
            twin = out / "images" / ade_name / described["file_name"]
            assert twin.read_bytes() == (out / coco_name / described["file_name"]).read_bytes()
    assert main(command) == 2
    assert "out: expected a new or empty folder" in capsys.readouterr().err


def test_write_scenes_deterministic(tmp_path):
    digests = []
    for name in ("a", "b"):
        write_scenes(tmp_path / name, train=2, val=1, size=48, seed=7)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        digests.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in files])
        json.loads((tmp_path / name / "annotations" / "instances_val2017.json").read_text())
    assert digests[0] == digests[1]


def test_scenes_invalid_arguments(tmp_path):
    with pytest.raises(ValueError, match="split: expected one of train, val, got 'test'"):
        compose("test", 0)
    with pytest.raises(ValueError, match="size: expected at least 32 pixels, got 8"):
        compose("val", 0, size=8)
    with pytest.raises(ValueError, match="val: expected at least 1 scene, got 0"):
        write_scenes(tmp_path / "new", val=0)

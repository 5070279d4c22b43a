"""The recipes for users' own small data, on folders without a validation split."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from ppma.data.scenes_files import write_scenes
from ppma.tasks.data_check import check_data
from ppma.tasks.registry import load_config, make_task
from ppma.tasks.run import train

SHORT = ("steps=1", "batch_size=2", "workers=0", "log=[csv]")
SMALL_DETECTOR = ("detector.channels=16", "detector.box_channels=32", "detector.proposals=20", "detector.detections=5")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def class_folders(root):
    for name in ("red", "blue"):
        (root / name).mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (40, 30), name).save(root / name / f"{number}.png")


def label_folder(root):
    for folder in ("images", "labels"):
        (root / folder).mkdir(parents=True)
    (root / "classes.txt").write_text("ground\nsky\n")
    values = np.zeros((30, 40), np.uint8)
    values[:15] = 1
    for number in range(10):
        Image.fromarray(np.dstack([values * 200] * 3)).save(root / "images" / f"{number}.png")
        Image.fromarray(values).save(root / "labels" / f"{number}.png")


def coco_folder(root):
    write_scenes(root, train=10, val=1, size=48)
    (root / "annotations" / "instances_val2017.json").unlink()
    shutil.rmtree(root / "val2017")


CASES = {
    "small_classification": (class_folders, {"train": 36, "val": 4}, ["data.image_size=32"]),
    "small_segmentation": (label_folder, {"train": 9, "val": 1}, ["data.short_side=48", "augment.crop=48"]),
    "small_detection": (
        coco_folder,
        {"train": 9, "val": 1},
        ["augment.short_sides=[64]", "augment.crop_short_sides=[96]", "detector.short_side=64", *SMALL_DETECTOR],
    ),
}


@pytest.mark.parametrize("recipe", CASES)
@pytest.mark.filterwarnings("ignore:data.root. no")
def test_root_alone(recipe, tmp_path):
    """Nothing but data.root is needed to open, split and augment the data."""
    write, expected, _ = CASES[recipe]
    write(tmp_path / "data")
    check = check_data(make_task(load_config(recipe, [f"data.root={tmp_path / 'data'}"])), panels=2)
    assert {split.name: split.samples for split in check.splits} == expected
    assert not any(split.broken for split in check.splits)


@pytest.mark.parametrize("recipe", CASES)
@pytest.mark.filterwarnings("ignore:data.root. no")
def test_trains(recipe, tmp_path):
    write, expected, smaller = CASES[recipe]
    write(tmp_path / "data")
    summary = train(recipe, tmp_path / "run", assignments=[f"data.root={tmp_path / 'data'}", *SHORT, *smaller])
    assert (summary["steps"], summary["val_count"]) == (1, expected["val"])
    assert (tmp_path / "run" / "best.safetensors").is_file()

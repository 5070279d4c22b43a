"""The recipes for small data on public data sets, which the folder `PPMA_TEST_DATA` has to hold."""

import os
from pathlib import Path

import pytest
from small_sets import cifar10_folder, pets_coco, pets_labels

from ppma.engine.logging import read_rows
from ppma.tasks.run import train

FOLDER = os.environ.get("PPMA_TEST_DATA")
CIFAR10, PETS = "cifar-10-batches-bin", "oxford-iiit-pet"  # as their archives call them


def short_run(recipe, name, write, count, tmp_path, *changes):
    """Train on a subset, with nothing but the location and the length changed; returns the summary."""
    source = Path(FOLDER or "") / name
    if FOLDER is None or not source.is_dir():
        pytest.skip(f"expected {name} in the folder of the environment variable PPMA_TEST_DATA, found none")
    write(source, tmp_path / "data", count)
    length = ("steps=100", "eval_steps=100", "schedule.warmup_steps=10", "workers=0", "log=[csv]", "log_steps=10")
    summary = train(recipe, tmp_path / "run", assignments=[f"data.root={tmp_path / 'data'}", *length, *changes])
    losses = [row["train_loss"] for row in read_rows(tmp_path / "run" / "metrics.csv") if row.get("train_loss")]
    assert losses[-1] < losses[0]
    return summary


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:data.root. no")
def test_small_classification_cifar10(tmp_path):
    summary = short_run("small_classification", CIFAR10, cifar10_folder, 2000, tmp_path)
    assert summary["val_top1"] > 15  # of ten classes; 25.3 with seed 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:data.root. no")
def test_small_segmentation_pets(tmp_path):
    summary = short_run("small_segmentation", PETS, pets_labels, 200, tmp_path)
    assert summary["val_mIoU"] > 40  # 58.3 with seed 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:data.root. no")
def test_small_detection_pets(tmp_path):
    summary = short_run("small_detection", PETS, pets_coco, 200, tmp_path)
    assert summary["val_box_AP50"] > 5  # 31.6 with seed 0

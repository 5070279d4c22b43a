"""Freezing, learning rates and gradient checkpointing in every task."""

import pytest
import timm
from short_run import SHORT_DENSE, SMALL_DECODER, SMALL_DETECTOR

from ppma.data.scenes_files import write_scenes
from ppma.engine import checkpoint
from ppma.engine.model import freeze
from ppma.engine.optim import make_optimizer
from ppma.models import PolylineBackbone
from ppma.tasks.classification.task import Classification
from ppma.tasks.detection import mask_rcnn
from ppma.tasks.detection.task import Detection
from ppma.tasks.registry import load_config, task_class
from ppma.tasks.run import train
from ppma.tasks.segmentation import upernet
from ppma.tasks.segmentation.task import Segmentation


@pytest.mark.parametrize(
    ("model", "task"),
    [
        (lambda: mask_rcnn("ppma_nano", num_classes=3), Detection),
        (lambda: upernet("ppma_nano", num_classes=3), Segmentation),
        (lambda: timm.create_model("ppma_nano", num_classes=3), Classification),
    ],
    ids=["detection", "segmentation", "classification"],
)
def test_backbone_options_find_backbone(model, task):
    built = model()
    assert isinstance(built.get_submodule(task.backbone), PolylineBackbone)
    prefix = f"{task.backbone}." if task.backbone else ""
    freeze(built, [f"{prefix}stem.*"])
    changes = ["optimizer.backbone_lr_scale=0.1", "optimizer.layer_decay=0.9"]
    config = load_config("digits_nano", changes)
    groups = make_optimizer(config, built, task.backbone).param_groups
    names = {id(parameter): name for name, parameter in built.named_parameters()}
    scales = {names[id(parameter)]: group["lr_scale"] for group in groups for parameter in group["params"]}
    assert not any(name.startswith(f"{prefix}stem.") for name in scales)
    first, last = (scales[f"{prefix}stages.{stage}.blocks.0.position.weight"] for stage in (0, 3))
    assert first < last <= 0.1
    assert {scale for name, scale in scales.items() if prefix and not name.startswith(prefix)} <= {1.0}
    assert max(scales.values()) == 1.0


@pytest.mark.parametrize("recipe", ["scenes_maskrcnn_nano", "scenes_upernet_nano"])
def test_backbone_options_dense_recipes(recipe):
    config = load_config(recipe, ["optimizer.layer_decay=0.8", "freeze=[backbone.*]", "grad_checkpointing=true"])
    assert config.optimizer.layer_decay == 0.8


@pytest.mark.parametrize(
    ("recipe", "small"),
    [("scenes_maskrcnn_nano", SMALL_DETECTOR), ("scenes_upernet_nano", SMALL_DECODER)],
    ids=["detection", "segmentation"],
)
def test_backbone_options_dense_training(tmp_path, recipe, small):
    write_scenes(tmp_path / "scenes", train=4, val=1, size=64)
    prefix = f"{task_class(load_config(recipe).task).backbone}."
    changes = (
        *SHORT_DENSE, *small, f"data.root={tmp_path / 'scenes'}", "log=[csv]", "steps=1", "eval_steps=1", "ema=null",
        f"freeze=[{prefix}stem.*]", "optimizer.layer_decay=0.8", "optimizer.backbone_lr_scale=0.1",
        "grad_checkpointing=true", "workers=0", "checkpoint_steps=1", "schedule.name=constant",
    )  # fmt: skip
    train(recipe, tmp_path / "run", assignments=changes)
    optimizer = checkpoint.load(checkpoint.path_of(tmp_path / "run", 1))["optimizer"]
    rates = {group["lr_scale"]: group["lr"] for group in optimizer["param_groups"]}
    assert len(rates) > 3
    top = max(rates.values())
    assert all(rate == pytest.approx(scale * top) for scale, rate in rates.items())

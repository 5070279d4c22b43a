"""Learning rates, weight decay and the moving average."""

import json
import math

import pytest
import timm
import torch
from stand_in import make, run
from torch import nn

import ppma  # noqa: F401  (registers the models)
from ppma.engine.logging import read_rows
from ppma.engine.optim import make_ema, make_optimizer, make_schedule


def test_ema_short_run(tmp_path):
    """Without a warm-up, 94 % of the average would be the random start, which guesses."""
    settings = ("samples=200", "batch_size=20", "epochs=6", "eval_epochs=6", "dropout=0")
    trainer = run(tmp_path / "ema", *settings, "ema.decay=0.999")
    run(tmp_path / "raw", *settings, "ema=null")
    averaged, raw = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("ema", "raw"))
    assert raw["val_accuracy"] > 0.7
    assert averaged["val_accuracy"] >= raw["val_accuracy"] - 0.1
    start = run(tmp_path / "start", "epochs=null", "steps=1", "lr=1e-9", "ema=null", "dropout=0").model
    weights = [model[0].weight.detach() for model in (start, trainer.model, trainer.eval_model)]
    assert (weights[2] - weights[1]).norm() < 0.3 * (weights[1] - weights[0]).norm()


def test_ema_warm_up():
    ema = make_ema(make("ema.decay=0.99").config, torch.nn.Linear(2, 2))
    decays = [ema.get_decay(step) for step in range(1, 2000)]
    assert decays == [min(0.99, (1 + t) / (10 + t)) for t in range(1, 2000)]
    assert decays[890] == 0.99


@pytest.mark.parametrize("name", ["cosine", "poly", "multistep", "constant"])
def test_schedule_learning_rates(tmp_path, name):
    run(
        tmp_path, f"schedule.name={name}", "epochs=4", "log_steps=1", "schedule.warmup_epochs=0",
        "schedule.warmup_steps=4", "schedule.milestones=[2,3]", "schedule.min_lr=0.001",
    )  # fmt: skip
    rates = [row["lr"] for row in read_rows(tmp_path / "metrics.csv")]
    assert rates[:4] == pytest.approx([0, 0.0025, 0.005, 0.0075])
    expected = {
        "cosine": lambda t: 0.001 + 0.0045 * (1 + math.cos(math.pi * t / 24)),
        "poly": lambda t: 0.001 + 0.009 * (1 - t / 24),
        "multistep": lambda t: 0.01 * 0.1 ** ((t >= 12) + (t >= 18)),
        "constant": lambda t: 0.01,
    }[name]
    assert rates[4:] == pytest.approx([expected(t) for t in range(4, 24)])


class Dense(nn.Module):
    """A backbone with a head around it, as detectors and segmenters have."""

    def __init__(self):
        super().__init__()
        self.backbone = timm.create_model("ppma_nano", num_classes=0)
        self.head = nn.Conv2d(128, 3, 1)

    def no_weight_decay(self):
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}


def scales(model, backbone, *settings):
    """The factor on the learning rate and the weight decay of each parameter, once the schedule has set the rate."""
    config = make("lr=0.1", "schedule.warmup_epochs=0", *settings).config
    optimizer = make_optimizer(config, model, backbone)
    make_schedule(config, optimizer, steps=10, steps_per_epoch=5).step_update(0)
    found = {
        id(p): (group["lr"] / 0.1, group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
    }
    return {name: found[id(parameter)] for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_optimizer_layer_decay_dense():
    found = scales(Dense(), "backbone", "optimizer.layer_decay=0.5", "optimizer.weight_decay=0.05")
    assert found["head.weight"] == (1.0, 0.05)
    assert found["head.bias"] == (1.0, 0.0)
    depth = {
        name: found[name][0]
        for name in found
        if name.startswith("backbone.stages") and name.endswith("position.weight")
    }
    assert list(depth.values()) == sorted(depth.values())
    assert len(set(depth.values())) == 8  # the blocks of ppma_nano
    assert found["backbone.stem.layers.0.weight"][0] == pytest.approx(0.5 * min(depth.values()))
    excluded = {name for name, (_, decay) in found.items() if decay == 0}
    assert Dense().no_weight_decay() <= excluded


def test_optimizer_backbone_lr_scale_dense():
    found = scales(Dense(), "backbone", "optimizer.backbone_lr_scale=0.1")
    assert {round(scale, 9) for name, (scale, _) in found.items() if name.startswith("backbone.")} == {0.1}
    assert {scale for name, (scale, _) in found.items() if name.startswith("head.")} == {1.0}


def test_optimizer_backbone_lr_scale_classification():
    found = scales(timm.create_model("ppma_nano", num_classes=5), "", "optimizer.backbone_lr_scale=0.1")
    assert {name for name, (scale, _) in found.items() if scale == 1} == {"head.fc.weight", "head.fc.bias"}


def test_optimizer_scales_multiply():
    both = scales(Dense(), "backbone", "optimizer.backbone_lr_scale=0.1", "optimizer.layer_decay=0.5")
    decayed = scales(Dense(), "backbone", "optimizer.layer_decay=0.5")
    name = "backbone.stages.1.blocks.0.position.weight"
    assert both[name][0] == pytest.approx(0.1 * decayed[name][0])


def test_optimizer_scales_of_a_model_without_layers():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    found = scales(model, "0", "optimizer.backbone_lr_scale=0.5")
    assert (found["0.0.weight"][0], found["1.weight"][0]) == (0.5, 1.0)


def test_optimizer_scales_follow_the_schedule(tmp_path):
    trainer = run(
        tmp_path, "optimizer.layer_decay=0.5", "schedule.name=constant", "epochs=1", "schedule.warmup_epochs=0"
    )
    assert {group["lr"] / group["lr_scale"] for group in trainer.optimizer.param_groups} == {0.01}

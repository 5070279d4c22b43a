"""Learning rates, weight decay and the moving average."""

import dataclasses
import itertools
import json
import math

import pytest
import timm
import torch
from stand_in import make, run
from torch import nn

import ppma
from ppma.config import ConfigError
from ppma.engine.config import EmaConfig, OptimizerConfig, RunConfig, ScheduleConfig
from ppma.engine.distributed import SyncBatchNorm2d, World, synchronise_batch_norm
from ppma.engine.logging import read_rows
from ppma.engine.model import build_model
from ppma.engine.optim import make_ema, make_optimizer, make_schedule
from ppma.tasks.detection import mask_rcnn
from ppma.tasks.segmentation import upernet

CONFIG = RunConfig(task="t", model="ppma_nano", epochs=300, batch_size=8, lr=1e-3)
SCALED = {"layer_scale": (None, None, 1e-6, 1e-6), "formulation": "release"}


def test_adamw_fused_on_cpu():
    model = nn.Linear(3, 4)
    assert make_optimizer(CONFIG, model).defaults["fused"]
    assert not make_optimizer(CONFIG, model.to("meta")).defaults["fused"]


def test_muon_float32_on_cpu(monkeypatch):
    """The update of Muon is nearly orthogonal. In float32 it does not have the rounding errors of timm's bfloat16."""
    chosen = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(name="muon", weight_decay=0.0), lr=1.0)
    products = []
    matmul = torch.addmm
    monkeypatch.setattr(
        torch, "addmm", lambda *args, **options: products.append(args[0].dtype) or matmul(*args, **options)
    )
    layers = [nn.Linear(24, 16, bias=False).requires_grad_() for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    gradient = torch.linspace(-1, 1, 24 * 16).reshape(16, 24).sin() + torch.eye(16, 24)
    optimizers = make_optimizer(chosen, layers[0]), timm.optim.create_optimizer_v2(layers[1], opt="muon", lr=1.0)
    updates = []
    for layer, optimizer in zip(layers, optimizers, strict=True):
        before = layer.weight.detach().clone()
        layer.weight.grad = gradient.clone()
        optimizer.step()
        updates.append(before - layer.weight.detach())
    assert products[: len(products) // 2] == [torch.float32] * (len(products) // 2)
    assert products[len(products) // 2 :] == [torch.bfloat16] * (len(products) // 2)
    # Five iterations of three products with errors of 2^-9 each, relative to singular values near 1.
    assert 0 < (updates[0] - updates[1]).norm() < 15 * 2**-9 * updates[1].norm()
    assert type(make_optimizer(chosen, nn.Linear(3, 4).to("meta"))) is timm.optim.Muon


def test_ema_short_run(tmp_path):
    """Without a warm-up, 94 % of the average would be the random start, which guesses."""
    settings = ("samples=200", "batch_size=20", "epochs=6", "eval_epochs=6", "dropout=0")
    trainer = run(tmp_path / "ema", *settings, "ema.decay=0.999")
    run(tmp_path / "raw", *settings, "ema=null")
    averaged, raw = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("ema", "raw"))
    assert raw["val_accuracy"] > 0.7
    assert averaged["val_accuracy"] >= raw["val_accuracy"] - 0.1
    start = run(tmp_path / "start", "epochs=null", "steps=1", "lr=1e-9", "ema=null", "dropout=0").learner.model
    weights = [model[0].weight.detach() for model in (start, trainer.learner.model, trainer.learner.eval_model)]
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


@pytest.mark.parametrize(
    ("name", "shape"), [("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2), ("poly", lambda x: 1 - x)]
)
def test_schedule_warmup_prefix(tmp_path, name, shape):
    """The whole schedule follows the warm-up, from its peak to its end."""
    run(
        tmp_path, f"schedule.name={name}", "epochs=4", "log_steps=1", "schedule.warmup_epochs=0",
        "schedule.warmup_steps=4", "schedule.warmup_prefix=true",
    )  # fmt: skip
    rates = [row["lr"] for row in read_rows(tmp_path / "metrics.csv")]
    assert rates[:4] == pytest.approx([0, 0.0025, 0.005, 0.0075])
    steps = len(rates)
    assert rates[4:] == pytest.approx([0.01 * shape((step - 4) / (steps - 4)) for step in range(4, steps)])


@pytest.mark.parametrize("prefix", ["true", "false"])
def test_schedule_longer_than_run(tmp_path, prefix):
    """A run that ends before its schedule has the learning rates of the longer run."""
    shared = ("log_steps=1", "schedule.min_lr=0.001", f"schedule.warmup_prefix={prefix}")
    run(tmp_path / "long", "epochs=4", *shared)
    run(tmp_path / "short", "epochs=2", "schedule.epochs=4", *shared)
    long, short = ([row["lr"] for row in read_rows(tmp_path / name / "metrics.csv")] for name in ("long", "short"))
    assert short == long[: len(long) // 2]


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


def test_optimizer_decay_lr_scale():
    """On all parameters of the decay heads and on nothing else; it multiplies the scales of the layers."""
    found = scales(Dense(), "backbone", "optimizer.decay_lr_scale=10", "optimizer.weight_decay=0.05")
    plain = scales(Dense(), "backbone", "optimizer.weight_decay=0.05")
    heads = {name for name in found if ".decay." in name}
    assert {name for name, (scale, _) in found.items() if scale > 1} == heads
    assert len(heads) == 2 * 8  # weight and bias in the blocks of ppma_nano
    assert {name: decay for name, (_, decay) in found.items()} == {name: decay for name, (_, decay) in plain.items()}
    both = scales(Dense(), "backbone", "optimizer.decay_lr_scale=10", "optimizer.backbone_lr_scale=0.1")
    assert {round(both[name][0], 9) for name in heads} == {1.0}


def test_optimizer_decay_lr_scale_without_decay_heads():
    model = timm.create_model("ppma_nano", num_classes=2, mask="none")
    assert {scale for scale, _ in scales(model, "", "optimizer.decay_lr_scale=10").values()} == {1.0}


def test_parameter_groups():
    """For a loop without the engine: every trained parameter once, with the rates and weight decays of the engine."""
    model = ppma.retrofit(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3))
    model.patch_embed.requires_grad_(False)
    optimizer = timm.optim.create_optimizer_v2(ppma.parameter_groups(model, 0.1, decay_lr_scale=10), opt="adamw")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {
        names[id(p)]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
    }
    assert set(found) == {name for name in names.values() if not name.startswith("patch_embed.")}
    assert found["blocks.0.attn.decay.weight"] == (1.0, 0.05)
    assert found["blocks.1.attn.decay.rate"] == (1.0, 0.0)
    assert found["blocks.0.attn.qkv.weight"] == (0.1, 0.05)
    assert found["blocks.0.attn.qkv.bias"] == (0.1, 0.0)
    assert found["cls_token"] == (0.1, 0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [group["lr"] for group in optimizer.param_groups], 10)
    optimizer.step()
    schedule.step()
    rates = sorted({round(group["lr"], 9) for group in optimizer.param_groups})
    assert rates[1] == pytest.approx(10 * rates[0])
    with pytest.raises(ValueError, match=r"^decay_lr_scale: expected a number > 0, got 0$"):
        ppma.parameter_groups(model, 0.1, decay_lr_scale=0)


def test_optimizer_scales_of_a_model_without_layers():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    found = scales(model, "0", "optimizer.backbone_lr_scale=0.5")
    assert (found["0.0.weight"][0], found["1.weight"][0]) == (0.5, 1.0)


def test_optimizer_scales_follow_the_schedule(tmp_path):
    trainer = run(
        tmp_path, "optimizer.layer_decay=0.5", "schedule.name=constant", "epochs=1", "schedule.warmup_epochs=0"
    )
    assert {group["lr"] / group["lr_scale"] for group in trainer.learner.optimizer.param_groups} == {0.01}


def with_groups(groups, **options):
    return dataclasses.replace(CONFIG, optimizer=OptimizerConfig(weight_decay_groups=groups, **options))


def decayed(model, groups):
    """Names of the parameters with weight decay; every parameter is in one group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(with_groups(groups), model)
    assert sorted(id(p) for group in optimizer.param_groups for p in group["params"]) == sorted(names)
    return {names[id(p)] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}


def test_weight_decay_groups_classification():
    """The authors decay the layer scales, which are 4-D there; the rest is the same."""
    model = timm.create_model("ppma_nano", **SCALED)
    ours, authors = (decayed(model, groups) for groups in ("ours", "authors"))
    scales = {name for name, _ in model.named_parameters() if name.endswith("_scale.gamma")}
    assert len(scales) == 2 * (4 + 1)
    assert authors == ours | scales
    assert not ours & scales


@pytest.mark.parametrize("make", [upernet, mask_rcnn])
def test_weight_decay_groups_dense(make):
    """MMCV spares names with "norm": biases, decays, batch norms of stem and heads are decayed."""
    model = make("ppma_nano", num_classes=5, **SCALED)
    authors = decayed(model, "authors")
    spared = {name for name, _ in model.named_parameters()} - authors
    norms = (".attn_norm.", ".ffn_norm.", ".downsample.norm.", ".feature_norms.")
    assert all(any(norm in name for norm in norms) for name in spared)
    for ending in ("dt_bias", "A_log", "qkv.bias", "attn_scale.gamma", "stem.layers.1.weight"):
        assert any(name.endswith(ending) for name in authors)
        assert not any(name.endswith(ending) for name in spared)
    assert all("batch_norm" not in name for name in spared)
    assert not any(name.endswith(("bias", "A_log", "gamma")) for name in decayed(model, "ours"))


def test_weight_decay_groups_errors():
    with pytest.raises(ConfigError, match="weight_decay_groups: expected 'ours' for this model, got 'authors'"):
        make_optimizer(with_groups("authors"), nn.Linear(2, 2))


def test_weight_decay_groups_layer_decay():
    """Both apply: the groups differ in the learning rate and in the weight decay."""
    model = timm.create_model("ppma_nano", num_classes=5, **SCALED)
    groups = make_optimizer(with_groups("authors", layer_decay=0.5), model).param_groups
    assert {group["weight_decay"] for group in groups} == {0.0, 0.05}
    assert len({group["lr_scale"] for group in groups}) > 5


def learning_rates(per, epochs=300, steps_per_epoch=10):
    """Of every step of the ImageNet schedule."""
    schedule = ScheduleConfig(name="cosine", min_lr=1e-5, warmup_epochs=5, warmup_lr=1e-6, per=per)
    config = dataclasses.replace(CONFIG, schedule=schedule)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.lr)
    made = make_schedule(config, optimizer, steps=epochs * steps_per_epoch, steps_per_epoch=steps_per_epoch)
    rates = []
    for step in range(epochs * steps_per_epoch):
        made.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_schedule_per_epoch():
    """Constant within an epoch and one epoch late, so that epochs 0 and 1 both start at 1e-6."""
    rates = torch.tensor(learning_rates("epoch"), dtype=torch.float64).view(300, 10)
    assert (rates == rates[:, :1]).all()
    expected = [1e-6 + epoch / 5 * (1e-3 - 1e-6) for epoch in (0, 0, 1, 2, 3, 4)]
    expected += [1e-5 + (1e-3 - 1e-5) * (1 + math.cos(math.pi * (epoch - 1) / 300)) / 2 for epoch in range(6, 300)]
    torch.testing.assert_close(rates[:, 0], torch.tensor(expected, dtype=torch.float64))


def test_schedule_per_step():
    rates = learning_rates("step")
    assert rates[0] == 1e-6
    assert all(later > earlier for earlier, later in itertools.pairwise(rates[:51]))
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[50:]))


def test_ema_warmup_off():
    model = nn.Linear(2, 2)
    decays = {
        warmup: make_ema(dataclasses.replace(CONFIG, ema=EmaConfig(0.99, warmup=warmup)), model).get_decay(1)
        for warmup in (True, False)
    }
    assert decays == {True: pytest.approx(2 / 11), False: 0.99}


def test_sync_batch_norm_skip():
    """As in the authors' segmentation: the heads are synchronised, the backbone is not."""
    model = synchronise_batch_norm(upernet("ppma_nano", num_classes=5), torch.device("cpu"), ["backbone"])
    backbone = [module for module in model.backbone.modules() if isinstance(module, nn.BatchNorm2d)]
    heads = [module for module in model.decode_head.modules() if isinstance(module, nn.BatchNorm2d)]
    assert backbone
    assert heads
    assert not any(isinstance(module, SyncBatchNorm2d) for module in backbone)
    assert all(isinstance(module, SyncBatchNorm2d) for module in heads)
    with pytest.raises(ConfigError, match=r"sync_batch_norm_skip: expected names of 0, .*, got 'bakbone'"):
        build_model(make("sync_batch_norm_skip=[bakbone]"), World())

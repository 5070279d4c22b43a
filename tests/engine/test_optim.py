"""Parameter groups, schedules and averages, with the settings that repeat the authors' trainings."""

import dataclasses
import itertools
import math

import pytest
import timm
import torch
from torch import nn

from ppma.config import ConfigError
from ppma.engine.config import EmaConfig, OptimizerConfig, RunConfig, ScheduleConfig
from ppma.engine.distributed import SyncBatchNorm2d, synchronise_batch_norm
from ppma.engine.optim import make_ema, make_optimizer, make_schedule
from ppma.tasks.detection import mask_rcnn
from ppma.tasks.segmentation import upernet

CONFIG = RunConfig(task="t", model="ppma_nano", epochs=300, batch_size=8, lr=1e-3)
SCALED = {"layer_scale": (None, None, 1e-6, 1e-6), "formulation": "release"}


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
    with pytest.raises(ConfigError, match="layer_decay: expected null with weight_decay_groups: authors"):
        with_groups("authors", layer_decay=0.9)


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
    with pytest.raises(ConfigError, match=r"sync_batch_norm_skip: expected names of backbone, .*, got 'bakbone'"):
        synchronise_batch_norm(model, torch.device("cpu"), ["bakbone"])
